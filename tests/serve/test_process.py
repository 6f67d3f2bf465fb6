"""How a server ends: it is told to stop, or it cannot start."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from tests.engine.fake_core import is_running
from tests.serve.load import LONG, run_streams
from tests.serve.server import Server, children, processes

pytestmark = pytest.mark.slow


OPTIONS = ("--max-num-seqs", "64", "--num-gpu-blocks-override", "20000")


def is_refused(server: Server) -> bool:
    """Whether new connections are."""
    try:
        httpx.get(f"{server.url}/health", timeout=30)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass  # it was in the queue when that was closed
    return False


def wait_for(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def signal_all(server: Server, signum: int) -> None:
    """As systemd does: to every process, the core's too."""
    for pid in (server.process.pid, server.core(), *server.front_ends()):
        os.kill(pid, signum)


@pytest.mark.parametrize(
    ("count", "signum", "send"),
    [
        (1, signal.SIGTERM, lambda server, signum: server.process.send_signal(signum)),
        (2, signal.SIGINT, signal_all),
    ],
    ids=["one-process", "two-processes"],
)
def test_an_order_to_stop_lets_requests_in_flight_finish_and_nothing_else_begin(
    checkpoint: Path, count: int, signum: int, send: Callable[[Server, int], None]
) -> None:
    options = ("--api-server-count", str(count), "--shutdown-timeout", "100")
    server = Server(checkpoint, *OPTIONS, *options)
    wait_for(lambda: count == 1 or len(server.front_ends()) == count)
    core, late = server.core(), httpx.Client(base_url=server.url, timeout=30)

    def stop() -> None:
        assert late.get("/ready").status_code == 200
        send(server, signum)
        wait_for(lambda: server.http.get("/ready").status_code == 503)
        wait_for(lambda: is_refused(server))
        reply = late.post("/v1/completions", json=LONG)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        assert reply.headers["connection"] == "close"

    endings = run_streams(server, [{**LONG, "max_tokens": 500}] * 50, stop)
    assert {(e.finish_reason, e.error, e.is_broken) for e in endings} == {("length", None, False)}
    assert server.process.wait(60) == 0
    assert not is_running(core)
    late.close()


@pytest.mark.parametrize(("count", "timeout"), [(1, "0"), (2, "0.5")])
def test_what_does_not_finish_in_time_ends_with_an_error(
    checkpoint: Path, count: int, timeout: str
) -> None:
    options = ("--api-server-count", str(count), "--shutdown-timeout", timeout)
    server = Server(checkpoint, *OPTIONS, *options)
    core = server.core()
    bodies = [LONG] * 4 + [{**LONG, "stream": False}]
    endings = run_streams(server, bodies, server.process.terminate)
    assert [ending.status for ending in endings] == [200] * 4 + [503]
    for ending in endings:
        assert ending.error is not None
        assert ending.error["message"] == "the server is shutting down"
        assert ending.error["code"] == "shutting_down"
    assert server.process.wait(60) == 0
    assert not is_running(core)


@pytest.mark.parametrize(
    ("count", "first", "second"),
    [(1, signal.SIGINT, signal.SIGINT), (2, signal.SIGTERM, signal.SIGINT)],
)
def test_a_second_signal_does_not_wait_for_requests_in_flight(
    checkpoint: Path, count: int, first: int, second: int
) -> None:
    options = ("--api-server-count", str(count), "--shutdown-timeout", "1000")
    server = Server(checkpoint, *OPTIONS, *options)
    core = server.core()

    def stop_twice() -> None:
        server.process.send_signal(first)
        wait_for(lambda: is_refused(server))
        server.process.send_signal(second)

    (ending,) = run_streams(server, [LONG], stop_twice)
    assert ending.error is not None
    assert ending.error["code"] == "shutting_down"
    assert server.process.wait(60) == 0
    assert not is_running(core)


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_server_that_is_told_to_stop_while_it_loads_leaves_nothing(
    checkpoint: Path, count: str
) -> None:
    command = [sys.executable, "-m", "nano.serve", "--model", str(checkpoint), "--port", "0"]
    server = subprocess.Popen([*command, "--api-server-count", count, "--log-level", "warning"])
    wait_for(lambda: processes(server.pid, "nano.engine.process"))
    started = children(server.pid)
    server.terminate()
    assert server.wait(60) == 0
    wait_for(lambda: not any(is_running(pid) for pid in started))


def test_a_server_that_is_told_to_stop_while_it_restarts_its_core_leaves_nothing(
    checkpoint: Path,
) -> None:
    server = Server(checkpoint, *OPTIONS, "--restart-engine", "9")
    core = server.core()
    os.kill(core, signal.SIGKILL)
    wait_for(lambda: [pid for pid in children(server.process.pid) if pid != core])
    started = children(server.process.pid)
    assert server.stop() == 0
    wait_for(lambda: not any(is_running(pid) for pid in started))


def test_several_processes_share_a_unix_socket(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = Server(checkpoint, *OPTIONS, "--api-server-count", "2", uds=path)
    wait_for(lambda: len(server.front_ends()) == 2)
    first, second = server.front_ends()
    for other in (first, second):
        os.kill(other, signal.SIGSTOP)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as http:
            assert http.get("http://server/ready").status_code == 200
        os.kill(other, signal.SIGCONT)
    assert server.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize("count", ["1", "2"])
def test_weights_that_the_core_cannot_read_end_the_server_with_the_reason(
    checkpoint: Path, tmp_path: Path, count: str
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix == ".json":
            (damaged / file.name).write_bytes(file.read_bytes())
    (damaged / "model.safetensors").write_bytes(b"not weights")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "nano.serve", "--port", "0"),
            *("--model", str(damaged), "--api-server-count", count),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr.count("model.safetensors") == 1
    assert "Traceback" not in result.stderr


def test_a_server_whose_model_does_not_load_says_why_and_ends(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "nano.serve", "--model", str(tmp_path / "nothing")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert str(tmp_path / "nothing") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_small_cache_and_processed_logprobs_are_told_apart_from_errors(
    checkpoint: Path,
) -> None:
    options = ("--num-gpu-blocks-override", "4", "--logprobs-mode", "processed_logprobs")
    server = Server(checkpoint, *options)
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="64 tokens long; at most 63 fit") as no:
        client.completions.create(model="tiny", prompt="x" * 64)
    assert no.value.param == "prompt"
    full = client.completions.create(model="tiny", prompt="x" * 60, max_tokens=100)
    assert full.choices[0].finish_reason == "length"
    assert full.usage is not None
    assert full.usage.completion_tokens == 4
    only_a = client.completions.create(
        model="tiny", prompt="x", max_tokens=1, logprobs=2, extra_body={"allowed_token_ids": [65]}
    )
    logprobs = only_a.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [0.0]
    assert logprobs.top_logprobs is not None
    assert -9999.0 in logprobs.top_logprobs[0].values()
    assert server.stop() == 0


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "nano.serve", "--model", str(checkpoint), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "weights" not in done.stderr
