"""run_eagerly: a coroutine that begins at once and becomes a task only if it has to wait.

A task's first step waits for a turn of the event loop, which costs more than most writes to a
socket do. Python has this itself from 3.12 on (`asyncio.eager_task_factory`).
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def run_eagerly(
    coroutine: Coroutine[Any, Any, None], task: asyncio.Task[Any]
) -> asyncio.Task[None] | None:
    """Run `coroutine` up to its first wait, and leave the rest, if there is one, to a task.

    Raises what `coroutine` raises before it waits. It runs on behalf of `task`, which waits for it:
    libraries ask for the current task, and where there is none, as in a callback, it is that one.
    """
    loop = asyncio.get_running_loop()
    is_callback = asyncio.current_task() is None
    if is_callback:
        asyncio._enter_task(loop, task)
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    finally:
        if is_callback:
            asyncio._leave_task(loop, task)
    return loop.create_task(_rest(coroutine, awaited))


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
