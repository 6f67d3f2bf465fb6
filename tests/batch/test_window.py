"""The window of lines in flight, over an application that answers at once."""

import asyncio
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from nano.batch.batch import Batch
from nano.batch.line_reader import CHUNK_BYTES, NUM_CHUNKS_AHEAD, LineReader
from nano.batch.output_file import OutputFile
from nano.batch.progress import Progress
from nano.errors import ConfigError
from tests.batch.program import line, read, write


class Application:
    """Counts how many calls it has at a time."""

    def __init__(self) -> None:
        self.num_now = self.num_most = self.num_tasks = 0
        self.asgi = Starlette(routes=[Route("/v1/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> JSONResponse:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        self.num_tasks = max(self.num_tasks, len(asyncio.all_tasks()))
        body = await request.json()
        for _ in range(body["turns"]):
            await asyncio.sleep(0)
        self.num_now -= 1
        return JSONResponse({"usage": {"completion_tokens": 2}})


def run(source: Path, target: Path, is_ordered: bool, app: Application, window: int = 7) -> str:
    lines, output = LineReader(str(source)), OutputFile(str(target))
    progress = Progress(lines.num_lines, output)
    try:
        asyncio.run(Batch(app.asgi, output, progress, window, is_ordered).run(lines))
    finally:
        progress.close()
        output.close()
    return str(progress)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_no_more_lines_are_in_flight_than_the_window_holds(
    tmp_path: Path, is_ordered: bool
) -> None:
    num_lines = 3000
    source = write(tmp_path / "in", [line(f"{i}", {"turns": i % 50}) for i in range(num_lines)])
    assert source.stat().st_size < NUM_CHUNKS_AHEAD * CHUNK_BYTES, "the reader is not what holds"
    app = Application()
    assert f"{num_lines} lines" in run(source, tmp_path / "out", is_ordered, app)
    assert app.num_most == 7
    assert app.num_tasks <= 7 + 2  # and the run itself
    ids = [answer["id"] for answer in read(tmp_path / "out")]
    expected = [f"batch_req_{i + 1}" for i in range(num_lines)]
    assert (ids == expected) is is_ordered
    assert sorted(ids) == sorted(expected)


def test_an_output_of_another_input_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    write(source, [line(name, {"turns": 0}) for name in "abc"])
    run(source, target, True, Application())
    write(source, [line(name, {"turns": 0}) for name in "acbd"])
    with pytest.raises(ConfigError, match="line 2 with custom_id 'b', but the input's is 'c'"):
        run(source, target, True, Application())
    write(source, [line(name, {"turns": 0}) for name in "abcd"])  # lines may be added
    assert "1 lines" in run(source, target, True, Application())
    assert [answer["custom_id"] for answer in read(target)] == [*"abcd"]


def test_a_line_longer_than_what_is_read_at_once_is_one_line(tmp_path: Path) -> None:
    texts = ["x" * (CHUNK_BYTES * 2 + 5), "", "y" * (CHUNK_BYTES - 1), " \r", "z"]
    (tmp_path / "in").write_text("\n".join(texts))

    async def collect() -> list[tuple[int, bytes]]:
        return [pair async for pair in LineReader(str(tmp_path / "in"))]

    assert asyncio.run(collect()) == [(i, texts[i - 1].encode()) for i in (1, 3, 5)]
