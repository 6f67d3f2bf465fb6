"""Batch: every line of the input asked of the application once, a window of them at a time."""

import asyncio
from uuid import uuid4

import msgspec
from starlette.types import ASGIApp

from nano.batch.asgi_call import Answer, post
from nano.batch.batch_line import BatchLine
from nano.batch.line_reader import LineReader
from nano.batch.output_file import OutputFile
from nano.batch.progress import Progress
from nano.errors import ConfigError, EngineUnavailable, InvalidRequest
from nano.serve.http.errors import describe

UNAVAILABLE = 503  # the engine's trouble and not the line's: no answer, the next run has it again


class Batch:
    """`run` it once. What grows with the input is the set of custom_ids, and nothing else."""

    def __init__(
        self,
        app: ASGIApp,
        output: OutputFile,
        progress: Progress,
        max_concurrency: int,
        is_ordered: bool,
    ):
        """`is_ordered` writes answers in the order of their lines, and holds back those behind."""
        self._app = app
        self._output = output
        self._progress = progress
        self._is_ordered = is_ordered
        self._window = asyncio.Semaphore(max_concurrency)
        self._custom_ids: set[str] = set()

    async def run(self, lines: LineReader) -> None:
        """Answer all lines that are not done. Cancelling ends those in flight, unanswered.

        Raises `EngineUnavailable`, `OSError` of the two files, and `ConfigError` if the output
        turns out to be another input's.
        """
        try:
            async with asyncio.TaskGroup() as group:
                written: asyncio.Task[None] | None = None
                async for number, text in lines:
                    line = BatchLine.parse(number, text)
                    self._check_custom_id(line)
                    if number not in self._output.done:
                        await self._window.acquire()
                        written = group.create_task(self._answer(line, written))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _check_custom_id(self, line: BatchLine) -> None:
        done = self._output.done.get(line.number)
        if done is not None and done.custom_id != line.custom_id:
            raise ConfigError(
                f"{self._output.path} has an answer to line {line.number} with custom_id "
                f"{done.custom_id!r}, but the input's is {line.custom_id!r}: it belongs to another "
                "input"
            )
        if line.custom_id in self._custom_ids:
            line.refusal = InvalidRequest(
                f"custom_id {line.custom_id!r} is taken by an earlier line", "custom_id"
            )
        elif line.custom_id is not None:
            self._custom_ids.add(line.custom_id)

    async def _answer(self, line: BatchLine, before: asyncio.Task[None] | None) -> None:
        answer = await self._ask(line)
        if self._is_ordered and before is not None:
            await before
        request_id = answer.headers.get("x-request-id") or f"req_{uuid4().hex}"
        self._output.append(line.number, line.custom_id, answer.status, request_id, answer.body)
        self._progress.count(answer.status, answer.body)
        self._window.release()

    async def _ask(self, line: BatchLine) -> Answer:
        if line.refusal is not None:
            status, body = describe(line.refusal)
            return Answer(status, body=msgspec.json.encode(body))
        answer = await post(self._app, line.url, line.body)
        if answer.status == UNAVAILABLE:
            raise EngineUnavailable(msgspec.json.decode(answer.body)["error"]["message"])
        return answer
