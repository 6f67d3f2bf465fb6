"""`python -m nano.batch` as its users run it."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.batch.program import Json, Program, comparable, line, read, write
from tests.serve.server import Server, children
from tests.tiny import make_checkpoint

CHAT = "/v1/chat/completions"
NUM_LONG = 40  # lines of `long`: enough to be killed in the midst of

# name -> (line, status, what its error is about)
BAD = {
    "json": ('{"custom_id": "torn", "method"', 400, None),
    "list": ("[1, 2]", 400, None),
    "no custom_id": ('{"method": "POST", "url": "/v1/completions", "body": {}}', 400, "custom_id"),
    "number": ('{"custom_id": 7, "method": "POST", "url": "/v1/completions"}', 400, "custom_id"),
    "method": (line("m", {"prompt": "x"}).replace("POST", "GET"), 400, "method"),
    "url": (line("u", {"prompt": "x"}, "/v1/embeddings"), 400, "url"),
    "extra": (line("e", {}).replace('"body"', '"x": 1, "body"'), 400, "x"),
    "no body": ('{"custom_id": "n", "method": "POST", "url": "/v1/completions"}', 400, "body"),
    "text body": (line("t", {}).replace("{}", '"x"'), 400, ...),
    "unknown": (line("p", {"prompt": "x", "temprature": 1}), 400, "temprature"),
    "range": (line("r", {"prompt": "x", "temperature": -1}), 400, "temperature"),
    "length": (line("l", {"prompt": "x" * 40_000}), 400, "prompt"),
    "model": (line("mo", {"prompt": "x", "model": "gpt-9"}), 404, "model"),
    "stream": (line("s", {"prompt": "x", "stream": True}), 400, "stream"),
    "repeated": (line("good-0", {"prompt": "x"}), 400, "custom_id"),
}  # fmt: skip


def good_bodies() -> list[tuple[str, Json]]:
    sampled: Json = {"temperature": 0.9, "seed": 5, "max_tokens": 12, "model": "tiny"}
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ünïcode?"}]
    return [
        ("/v1/completions", {"prompt": "One, two,", **sampled}),
        ("/v1/completions", {"prompt": ["a", "bc"], **sampled, "n": 2, "logprobs": 2}),
        ("/v1/completions", {"prompt": [65, 66], "max_tokens": 3, "echo": True, "seed": 1}),
        (CHAT, {"messages": talk, **sampled, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": talk, **sampled, "stop": ["e", "a"]}),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("batch") / "tiny", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def answers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    """The output of one run of all good lines with the bad ones between, by its id."""
    good = [line(f"good-{i}", body, url) for i, (url, body) in enumerate(good_bodies())]
    bad = [text for text, _, _ in BAD.values()]
    lines = [good[0], *bad, "", *good[1:]]
    place = tmp_path_factory.mktemp("mixed")
    status, _, log = Program(folder, write(place / "in", lines), place / "out").finish()
    assert status == 0, log
    assert f"{len(BAD) + len(good)} lines answered" in log
    assert f"{len(BAD)} of them with an error" in log
    found = read(place / "out")
    assert len(found) == len(good) + len(bad)
    assert all(answer["error"] is None for answer in found)
    return {answer["id"]: answer for answer in found}


@pytest.fixture(scope="module")
def long(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Json]]:
    """An input that takes seconds, and the output of an uninterrupted run of it."""
    place = tmp_path_factory.mktemp("long")
    lines = [
        line(f"r{i}", {"prompt": f"{i}:", "max_tokens": 150 + 7 * i, "seed": i, "ignore_eos": True})
        for i in range(NUM_LONG)
    ]
    lines[3], lines[20] = "{broken", lines[19]
    source = write(place / "in", lines)
    status, _, log = Program(folder, source, place / "out", *SLOW).finish()
    assert status == 0, log
    return source, read(place / "out")


SLOW = ("--max-num-seqs", "4", "--max-concurrency", "6")


def test_a_good_line_gets_the_body_that_the_server_answers(
    folder: Path, answers: dict[str, Json]
) -> None:
    server = Server(folder, "--compile-mode", "eager")
    try:
        by_custom_id = {a["custom_id"]: a for a in answers.values() if a["id"] != repeated_id()}
        for i, (url, body) in enumerate(good_bodies()):
            response = by_custom_id[f"good-{i}"]["response"]
            served = server.http.post(url, json=body)
            assert (response["status_code"], served.status_code) == (200, 200), served.text
            assert comparable(response["body"]) == comparable(served.json())
            assert response["request_id"]
    finally:
        server.stop()


def repeated_id() -> str:
    return f"batch_req_{2 + list(BAD).index('repeated')}"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_answered_with_its_own_4xx(answers: dict[str, Json], name: str) -> None:
    text, status, param = BAD[name]
    answer = answers[f"batch_req_{2 + list(BAD).index(name)}"]
    error = answer["response"]["body"]["error"]
    assert answer["response"]["status_code"] == status
    assert error["message"]
    assert param is ... or error["param"] == param
    try:
        given = json.loads(text).get("custom_id")
    except (ValueError, AttributeError):
        given = None
    assert answer["custom_id"] == (given if isinstance(given, str) else None)


def answered(output: list[Json]) -> dict[str, tuple[str | None, int, Json]]:
    found = {
        answer["id"]: (
            answer["custom_id"],
            answer["response"]["status_code"],
            comparable(answer["response"]["body"]),
        )
        for answer in output
    }
    assert len(found) == len(output), "a line is answered twice"
    return found


def test_a_run_killed_again_and_again_ends_with_the_lines_of_one_that_was_not(
    folder: Path, long: tuple[Path, list[Json]], tmp_path: Path
) -> None:
    source, uninterrupted = long
    target = tmp_path / "out"
    for number in (5, 15, 30):
        program = Program(folder, source, target, *SLOW)
        program.wait_for_lines(number)
        program.process.kill()
        assert program.finish()[0] == -signal.SIGKILL, "it ended before it was killed"
    with target.open("r+b") as file:  # as if the kill had come in the midst of a write
        file.seek(-9, os.SEEK_END)
        file.truncate()
    kept = target.read_bytes().rpartition(b"\n")[0]
    status, _, log = Program(folder, source, target, *SLOW).finish()
    assert status == 0, log
    assert target.read_bytes().startswith(kept + b"\n")
    assert answered(read(target)) == answered(uninterrupted)

    before = target.read_bytes()
    status, _, log = Program(folder, source, target, *SLOW).finish()
    assert status == 0
    assert "every line" in log
    assert target.read_bytes() == before


def test_an_interrupted_run_stops_cleanly_and_the_next_one_goes_on(
    folder: Path, long: tuple[Path, list[Json]], tmp_path: Path
) -> None:
    source, uninterrupted = long
    target = tmp_path / "out"
    for number, signum in ((4, signal.SIGINT), (12, signal.SIGTERM)):
        program = Program(folder, source, target, *SLOW)
        program.wait_for_lines(number)
        cores = children(program.process.pid)
        program.process.send_signal(signum)
        status, _, log = program.finish()
        assert status == 130, log
        assert "Traceback" not in log
        assert not any(Path(f"/proc/{pid}").exists() for pid in cores)
        assert target.read_bytes().endswith(b"\n")
    assert Program(folder, source, target).finish()[0] == 0
    assert answered(read(target)) == answered(uninterrupted)


def test_a_dead_engine_ends_the_run_and_no_line_is_answered_with_its_death(
    folder: Path, long: tuple[Path, list[Json]], tmp_path: Path
) -> None:
    source, uninterrupted = long
    program = Program(folder, source, tmp_path / "out", *SLOW)
    program.wait_for_lines(4)
    os.kill(children(program.process.pid)[0], signal.SIGKILL)
    status, _, log = program.finish()
    assert status == 1, log
    assert "the engine core is dead" in log
    assert answered(read(tmp_path / "out")).items() <= answered(uninterrupted).items()


def test_ordered_answers_come_in_the_order_of_their_lines(folder: Path, tmp_path: Path) -> None:
    lengths = [300, 1, 1, 60, 1]
    lines = [
        line(f"r{i}", {"prompt": "x", "max_tokens": length, "ignore_eos": True, "seed": 0})
        for i, length in enumerate(lengths)
    ]
    text = "\n".join(["\ufeff" + lines[0], *lines[1:], "nonsense"]).encode()
    status, out, log = Program(folder, "-", "-", "--ordered").finish(text)
    assert status == 0, log
    found = [json.loads(answer)["id"] for answer in out.splitlines()]
    assert found == [f"batch_req_{i}" for i in range(1, 7)]


def test_lines_of_a_pipe_are_answered_as_they_come_with_the_template_that_was_given(
    folder: Path,
) -> None:
    program = Program(folder, "-", "-", "--chat-template", "{{ messages[0].content }}!")
    stdin, stdout = program.process.stdin, program.process.stdout
    assert stdin is not None
    assert stdout is not None
    for custom_id in ("first", "second"):  # the second is written when the first is answered
        body = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 2}
        stdin.write(line(custom_id, body, CHAT).encode() + b"\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        assert answer["custom_id"] == custom_id
        assert answer["response"]["body"]["usage"]["prompt_tokens"] == len(custom_id) + 1
    assert program.finish()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-concurrency", "0"), "--max-concurrency must be at least 1, got 0"),
        (("--max-num-seqs", "0"), "max_num_seqs"),
    ],
)
def test_a_run_that_cannot_start_says_why_and_leaves_no_output(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    source = write(tmp_path / "in", [line("a", {"prompt": "x"})])
    status, _, log = Program(folder, source, tmp_path / "out", *arguments).finish()
    assert status == 1
    assert message in log
    assert not (tmp_path / "out").exists()
