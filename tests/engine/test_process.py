import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from nano.engine.codec import GOODBYE, HELLO, decode, encode
from nano.engine.core import EngineCore
from nano.engine.messages import (
    AbortRequests,
    AddRequests,
    ControlReply,
    ControlRequest,
    EngineFailure,
    EngineOutputs,
    EngineReady,
    FromCore,
    ToCore,
)
from nano.engine.process import CoreServer, Heart
from nano.engine.socket_client import SocketClient
from nano.engine.subprocess_client import SubprocessClient
from nano.errors import EngineDead
from nano.outputs import FinishReason, TokenOutput
from tests.engine.fake_core import SLOW_TOKEN, FakeExecutor, fake_config, fake_request

FAKE_CORE = (sys.executable, "-m", "tests.engine.fake_core")


class RawFrontEnd:
    """A front end that writes what it likes on the socket of a core it does not own."""

    def __init__(self, folder: str):
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"ipc://{folder}/core")
        self.send(HELLO)
        assert isinstance(self.receive(), EngineReady)

    def send(self, message: bytes | ToCore | FromCore) -> None:
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    def receive(self) -> ToCore | FromCore:
        assert self.socket.poll(10_000), "no answer"
        return decode(self.socket.recv())

    def finish(self, request_id: str) -> list[TokenOutput]:
        """All outputs up to the end of `request_id`, which is the only request."""
        outputs: list[TokenOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            message = self.receive()
            assert isinstance(message, EngineOutputs)
            outputs += message.outputs
        assert {output.request_id for output in outputs} == {request_id}
        return outputs

    def vanish(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture(scope="module")
def owner() -> Iterator[SubprocessClient]:
    client = SubprocessClient(fake_config(), FAKE_CORE)
    yield client
    client.close()


@pytest.fixture
def connect(owner: SubprocessClient) -> Iterator[Callable[[], RawFrontEnd]]:
    front_ends: list[RawFrontEnd] = []

    def connect() -> RawFrontEnd:
        front_ends.append(RawFrontEnd(owner.folder))
        return front_ends[-1]

    yield connect
    for front_end in front_ends:
        front_end.vanish()


def wait_until_idle(owner: SubprocessClient) -> None:
    deadline = time.monotonic() + 3  # the requests in question would run for longer
    while owner.control("stats")["num_running"]:
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.02)


def tokens_of(client: SocketClient, request_id: str) -> list[int]:
    """All tokens of the only request of `client`."""
    outputs: list[TokenOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += client.recv()
    assert {output.request_id for output in outputs} == {request_id}
    return [token_id for output in outputs for token_id in output.new_token_ids]


def long_request(request_id: str) -> AddRequests:
    """Some four and a half seconds of work."""
    return AddRequests([fake_request(request_id, SLOW_TOKEN, max_tokens=90)])


Connect = Callable[[], RawFrontEnd]


class FloodedRouter:
    """A socket with always one more message."""

    def poll(self, timeout: int) -> int:
        return 1

    def recv_multipart(self) -> list[bytes]:
        return [b"front end", GOODBYE]


def test_a_flood_of_messages_does_not_keep_the_core_from_stepping() -> None:
    core = EngineCore(fake_config(), FakeExecutor())
    server = CoreServer(core, cast("Any", FloodedRouter()), cast("Heart", None))
    reading = threading.Thread(target=server._drain_inbox, args=(0,), daemon=True)
    reading.start()
    reading.join(5)
    is_stuck = reading.is_alive()
    server.is_stopping = True
    assert not is_stuck


def test_front_ends_that_use_the_same_id_do_not_hear_of_each_other(connect: Connect) -> None:
    first, second = connect(), connect()
    first.send(AddRequests([fake_request("r/1", 10, max_tokens=6)]))
    second.send(AddRequests([fake_request("r/1", 20, max_tokens=6)]))
    for front_end, start in ((first, 11), (second, 21)):
        outputs = front_end.finish("r/1")
        tokens = [token_id for output in outputs for token_id in output.new_token_ids]
        assert tokens == list(range(start, start + 6))


def test_one_front_end_cannot_abort_the_request_of_another(connect: Connect) -> None:
    first, second = connect(), connect()
    first.send(AddRequests([fake_request("r", SLOW_TOKEN, max_tokens=4)]))
    second.send(AbortRequests(["r"]))
    assert first.finish("r")[-1].finish_reason is FinishReason.LENGTH


def test_requests_of_a_front_end_that_says_goodbye_are_aborted(
    connect: Connect, owner: SubprocessClient
) -> None:
    leaver = connect()
    leaver.send(long_request("r"))
    assert isinstance(leaver.receive(), EngineOutputs)
    leaver.send(GOODBYE)
    wait_until_idle(owner)


def test_requests_of_a_front_end_that_vanishes_are_aborted(owner: SubprocessClient) -> None:
    leaver = RawFrontEnd(owner.folder)
    leaver.send(long_request("r"))
    assert isinstance(leaver.receive(), EngineOutputs)
    leaver.vanish()
    wait_until_idle(owner)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xff" * 100,
        b"\x01garbage",
        HELLO + b"!",
        encode(long_request("r"))[:-3],
        encode(EngineFailure("I am the core")),
        encode(AddRequests([])),
        encode(AbortRequests(["nobody"])),
    ],
)
def test_no_bytes_on_the_socket_hurt_the_core(connect: Connect, data: bytes) -> None:
    front_end = connect()
    front_end.send(data)
    front_end.socket.send_multipart([b"one", b"two", b"three"])
    front_end.send(AddRequests([fake_request("after", 1)]))
    assert front_end.finish("after")[-1].finish_reason is FinishReason.LENGTH


def test_a_second_request_of_the_same_id_does_not_end_the_first(connect: Connect) -> None:
    front_end = connect()
    front_end.send(AddRequests([fake_request("r", 1), fake_request("r", 50)]))
    outputs = front_end.finish("r")
    assert [token_id for output in outputs for token_id in output.new_token_ids] == [2, 3, 4, 5]


def test_calls_are_answered_while_requests_run(connect: Connect) -> None:
    front_end = connect()
    front_end.send(long_request("r"))
    front_end.send(ControlRequest(7, "stats"))
    message = front_end.receive()
    while not isinstance(message, ControlReply):
        message = front_end.receive()
    assert message.call_id == 7
    assert message.result["num_running"] + message.result["num_waiting"] == 1
    front_end.send(GOODBYE)


@pytest.mark.parametrize("how", ["shutdown", "stdin"])
def test_a_core_that_is_told_to_stop_tells_its_front_ends_and_leaves_with_status_0(
    how: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("core"))
    config = '{"model": {"path": "none", "max_model_len": 100}}'
    core = subprocess.Popen(
        [*FAKE_CORE, "--folder", folder, "--config", config], stdin=subprocess.PIPE
    )
    assert core.stdin is not None
    front_end = RawFrontEnd(folder)
    front_end.send(long_request("r"))
    assert isinstance(front_end.receive(), EngineOutputs)
    if how == "shutdown":
        front_end.send(ControlRequest(1, "shutdown"))
    else:
        core.stdin.close()
    message = front_end.receive()
    while isinstance(message, EngineOutputs | ControlReply):
        message = front_end.receive()
    assert message == EngineFailure("it was told to stop")
    assert core.wait(10) == 0
    front_end.vanish()
    core.stdin.close()


def test_a_core_told_to_leave_before_it_loads_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    code = (
        "import time, nano.engine.process as process\n"
        "process.setup_logging = lambda *_: time.sleep(10)\n"
        f"process.main(['--folder', {str(folder)!r}, '--config', '{{}}'])"
    )
    subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, timeout=30)
    assert not folder.exists()


def test_signals_that_go_to_every_process_of_a_server_do_not_end_its_core(
    connect: Connect, owner: SubprocessClient
) -> None:
    front_end = connect()
    front_end.send(AddRequests([fake_request("r", SLOW_TOKEN, max_tokens=8)]))
    for signum in (signal.SIGTERM, signal.SIGINT):
        os.kill(owner.pid, signum)
    assert front_end.finish("r")[-1].finish_reason is FinishReason.LENGTH
    front_end.send(AddRequests([fake_request("after", 1)]))
    assert front_end.finish("after")[-1].finish_reason is FinishReason.LENGTH


def test_a_client_that_attaches_shares_the_core_and_leaves_it_running(
    owner: SubprocessClient,
) -> None:
    attached = SocketClient(owner.folder)
    assert attached.ready == owner.ready
    for client, start in ((attached, 10), (owner, 20)):
        client.add([fake_request("r", start, max_tokens=6)])
        assert tokens_of(client, "r") == list(range(start + 1, start + 7))
    attached.add(long_request("left behind").requests)
    attached.recv()
    attached.close()
    wait_until_idle(owner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "words"),
    [(signal.SIGKILL, "it ended"), (signal.SIGSTOP, "no heartbeat for 5 s|it ended")],
)
def test_a_client_that_attaches_sees_the_death_of_the_core(signum: int, words: str) -> None:
    owner = SubprocessClient(fake_config(), FAKE_CORE)
    attached = SocketClient(owner.folder)
    attached.add(long_request("r").requests)
    attached.recv()
    os.kill(owner.pid, signum)
    with pytest.raises(EngineDead, match=words):
        tokens_of(attached, "r")
    with pytest.raises(EngineDead):
        SocketClient(owner.folder)
    attached.close()
    owner.close()
