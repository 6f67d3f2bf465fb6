"""A coroutine that is run eagerly does what it would do as a task, sooner."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nano.serve.eager import run_eagerly


def own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def test_in_a_callback_the_current_task_is_the_one_that_waits_for_it() -> None:
    seen: list[asyncio.Task[Any] | None] = []

    async def work() -> None:
        seen.append(asyncio.current_task())

    def callback(task: asyncio.Task[Any]) -> None:
        run_eagerly(work(), task)
        seen.append(asyncio.current_task())

    async def run() -> None:
        asyncio.get_running_loop().call_soon(callback, own_task())
        await asyncio.sleep(0)
        assert seen == [own_task(), None]

    asyncio.run(run())


def test_what_need_not_wait_is_done_at_once() -> None:
    done: list[str] = []

    async def work() -> None:
        await asyncio.gather()  # of nothing: it does not wait
        done.append("work")

    async def run() -> None:
        assert run_eagerly(work(), own_task()) is None
        assert done == ["work"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "wait",
    [lambda: asyncio.sleep(0), lambda: asyncio.sleep(0.001), lambda: asyncio.to_thread(int)],
)
def test_what_waits_goes_on_as_a_task(wait: Callable[[], Awaitable[None]]) -> None:
    done: list[int] = []

    async def work() -> None:
        for turn in range(3):
            done.append(turn)
            await wait()

    async def run() -> None:
        task = run_eagerly(work(), own_task())
        assert done == [0]
        assert task is not None
        await task
        assert done == [0, 1, 2]

    asyncio.run(run())


def test_an_error_comes_from_where_it_happens() -> None:
    async def fails(waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        raise ValueError("no")

    async def run() -> None:
        with pytest.raises(ValueError, match="no"):
            run_eagerly(fails(waits=False), own_task())
        task = run_eagerly(fails(waits=True), own_task())
        assert task is not None
        with pytest.raises(ValueError, match="no"):
            await task

    asyncio.run(run())


def test_a_cancellation_arrives_where_it_waits_and_may_be_outlived() -> None:
    lived: list[str] = []

    async def work() -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lived.append("cancelled")
        await asyncio.sleep(0)
        lived.append("done")

    async def run() -> None:
        task = run_eagerly(work(), own_task())
        assert task is not None
        for _ in range(2):
            await asyncio.sleep(0)
            task.cancel()
        await task

    asyncio.run(run())
    assert lived == ["cancelled", "cancelled", "done"]
