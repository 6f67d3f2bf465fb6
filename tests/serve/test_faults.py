"""Faults of every kind while the server is at work, and the outcome that each must have."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano.engine.socket_client import SocketClient
from tests.engine.fake_core import is_running
from tests.serve.load import LONG, Ending, run_streams
from tests.serve.server import Server, arguments

pytestmark = pytest.mark.slow

OPTIONS = ("--max-num-seqs", "64", "--num-gpu-blocks-override", "20000")
SEEDED = {"prompt": "Once", "max_tokens": 16, "seed": 7, "temperature": 1.0}


def wait_for(is_so: Callable[[], Any]) -> None:
    """However long it takes on a busy machine."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def text_of(server: Server) -> str:
    reply = server.http.post("/v1/completions", json=SEEDED)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def is_ready(server: Server) -> bool:
    try:
        return server.http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def all_processes(server: Server) -> list[int]:
    return [server.process.pid, server.core(), *server.front_ends()]


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-processes"])
def restarting(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Replaces its core as often as these tests end one."""
    count = str(request.param)
    server = Server(checkpoint, *OPTIONS, "--restart-engine", "2", "--api-server-count", count)
    yield server
    processes = all_processes(server)
    assert server.stop() == 0
    assert not any(is_running(pid) for pid in processes)


@pytest.mark.parametrize(
    ("signum", "words"),
    [(signal.SIGKILL, "it was killed by signal 9|it ended"), (signal.SIGSTOP, "no heartbeat")],
    ids=["killed", "frozen"],
)
def test_a_core_that_dies_fails_every_caller_and_is_replaced(
    restarting: Server, signum: int, words: str
) -> None:
    before = text_of(restarting)
    core = restarting.core()
    bodies = [LONG] * 50 + [{**LONG, "stream": False}] * 4
    endings = run_streams(restarting, bodies, lambda: os.kill(core, signum))
    for ending in endings[:50]:
        assert (ending.status, ending.finish_reason) == (200, None)
        assert_failed(ending, "engine_dead")
    for ending in endings[50:]:
        assert ending.status == 503
        assert_failed(ending, "engine_dead", "engine_loading")
    assert restarting.http.get("/health").status_code == 200
    wait_for(lambda: is_ready(restarting))
    assert restarting.core() != core
    assert not is_running(core)
    assert text_of(restarting) == before


def assert_failed(ending: Ending, *codes: str) -> None:
    assert not ending.is_broken
    assert ending.error is not None
    assert ending.error["code"] in codes
    assert ending.error["type"] == "server_error"


def test_without_restarts_a_dead_core_is_told_for_a_while_and_ends_the_server(
    checkpoint: Path,
) -> None:
    server = Server(checkpoint, *OPTIONS)
    core = server.core()
    endings = run_streams(server, [LONG] * 2, lambda: os.kill(core, signal.SIGKILL))
    for ending in endings:
        assert_failed(ending, "engine_dead")
    # Callers are told at once, before it is known that no other core follows.
    wait_for(lambda: server.http.get("/health").status_code == 503)
    assert server.http.get("/ready").status_code == 503
    assert "killed by signal 9" in server.http.get("/health").json()["error"]["message"]
    reply = server.http.post("/v1/completions", json=SEEDED)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
    assert server.process.wait(60) == 1
    assert not is_running(core)


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Server]:
    """Two processes that answer HTTP."""
    server = Server(checkpoint, *OPTIONS, "--api-server-count", "2")
    wait_for(lambda: len(server.front_ends()) == 2)
    yield server
    server.stop()


def ask_anew(server: Server) -> str:
    """As `text_of`, over a connection that any process may accept."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        reply = http.post("/v1/completions", json=SEEDED)
    return str(reply.json()["choices"][0]["text"])


def test_the_same_seed_gives_the_same_tokens_whichever_process_answers(pair: Server) -> None:
    texts = []
    for other in pair.front_ends():
        os.kill(other, signal.SIGSTOP)
        texts.append(ask_anew(pair))
        os.kill(other, signal.SIGCONT)
    assert texts[0] == texts[1]


def test_a_process_that_is_killed_takes_its_own_streams_along_and_is_replaced(
    pair: Server,
) -> None:
    doomed, other = pair.front_ends()
    bodies = [{**LONG, "max_tokens": 200}] * 4
    survivors: list[Ending] = []

    def kill_while_the_other_streams() -> None:
        os.kill(other, signal.SIGCONT)
        os.kill(doomed, signal.SIGSTOP)  # so that it accepts none of these
        survivors.extend(run_streams(pair, bodies, lambda: os.kill(doomed, signal.SIGKILL)))

    os.kill(other, signal.SIGSTOP)
    lost = run_streams(pair, [LONG] * 4, kill_while_the_other_streams)
    assert all(ending.is_broken for ending in lost)
    assert {(ending.finish_reason, ending.is_broken) for ending in survivors} == {("length", False)}
    wait_for(lambda: len(pair.front_ends()) == 2)
    os.kill(other, signal.SIGSTOP)
    assert ask_anew(pair)
    os.kill(other, signal.SIGCONT)


def test_requests_of_processes_that_are_killed_leave_the_core(pair: Server) -> None:
    doomed = pair.front_ends()

    def kill() -> None:
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)

    endings = run_streams(pair, [LONG] * 4, kill)
    assert all(ending.is_broken for ending in endings)
    client = SocketClient(socket_folder(pair))
    wait_for(lambda: client.control("stats")["num_running"] == 0)
    client.close()
    assert ask_anew(pair)


def socket_folder(server: Server) -> str:
    words = arguments(server.core())
    return words[words.index("--folder") + 1]


def test_without_the_folder_of_the_sockets_those_who_are_connected_go_on(pair: Server) -> None:
    """Nobody can connect any more: when one who is connected dies, the server ends, and says so."""
    shutil.rmtree(socket_folder(pair))
    assert ask_anew(pair)
    processes = all_processes(pair)
    os.kill(pair.front_ends()[0], signal.SIGKILL)
    assert pair.process.wait(60) == 1
    wait_for(lambda: not any(is_running(pid) for pid in processes))


@pytest.mark.parametrize("count", [1, 2])
def test_no_process_outlives_a_server_that_is_killed(checkpoint: Path, count: int) -> None:
    server = Server(checkpoint, *OPTIONS, "--api-server-count", str(count))
    wait_for(lambda: count == 1 or len(server.front_ends()) == count)
    processes, folder = all_processes(server), socket_folder(server)
    run_streams(server, [LONG] * 2, server.process.kill)
    server.process.wait()
    wait_for(lambda: not any(is_running(pid) for pid in processes))
    assert not Path(folder).exists()


def test_a_full_disk_for_logs_is_no_trouble(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, Python has nothing to flush
    options = ("--log-level", "debug", "--access-log", "json", "--restart-engine", "1")
    with open("/dev/full", "wb", buffering=0) as full:
        server = Server(checkpoint, *OPTIONS, *options, stderr=full)
    before = text_of(server)
    os.kill(server.core(), signal.SIGKILL)
    wait_for(lambda: server.http.post("/v1/completions", json=SEEDED).status_code == 200)
    assert text_of(server) == before
    assert server.stop() == 0
