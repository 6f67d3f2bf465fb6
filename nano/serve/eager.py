"""run_eagerly: a coroutine that begins at once and becomes a task only if it has to wait.

A task's first step waits for a turn of the event loop, which costs more than most writes to a
socket do. Python has this itself from 3.12 on (`asyncio.eager_task_factory`).
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def run_eagerly(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `coroutine` up to its first wait, and leave the rest, if there is one, to a task.

    Raises what `coroutine` raises before it waits. Up to there it has no current task.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_rest(coroutine, awaited))


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """`coroutine`, which waits for `awaited`, as whoever awaits this sees it."""
    try:
        while True:
            try:
                yield awaited
            except BaseException as error:  # a cancellation, say
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(None)
    except StopIteration:
        pass
