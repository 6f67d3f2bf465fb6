import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from nano.engine.client import EngineClient, InProcessClient
from nano.engine.codec import decode, encode
from nano.engine.core import EngineCore
from nano.engine.messages import AddRequests, EngineHeartbeat, FromCore, ToCore
from nano.engine.subprocess_client import SubprocessClient
from nano.engine.watchdog import Watchdog
from nano.errors import CheckpointError, EngineDead, InvalidRequest
from nano.outputs import FinishReason, TokenOutput
from tests.engine.fake_core import (
    EXIT_TOKEN,
    RAISE_TOKEN,
    SLOW_TOKEN,
    FakeExecutor,
    fake_config,
    fake_request,
    is_running,
)

FAKE_CORE = (sys.executable, "-m", "tests.engine.fake_core")


def over_wire(message: ToCore | FromCore) -> ToCore | FromCore:
    return decode(encode(message))


def make_in_process() -> InProcessClient:
    return InProcessClient(EngineCore(fake_config(), FakeExecutor()), wire=over_wire)


def make_subprocess(path: str = "none") -> SubprocessClient:
    return SubprocessClient(fake_config(path), FAKE_CORE)


@pytest.fixture(scope="module")
def shared_subprocess() -> Iterator[SubprocessClient]:
    client = make_subprocess()
    yield client
    client.close()


@pytest.fixture(params=["in-process", "subprocess"])
def client(request: pytest.FixtureRequest) -> EngineClient:
    if request.param == "in-process":
        return make_in_process()
    client: EngineClient = request.getfixturevalue("shared_subprocess")
    return client


def receive(client: EngineClient, request_ids: Sequence[str]) -> dict[str, list[TokenOutput]]:
    """Everything about `request_ids` until each has finished."""
    outputs: dict[str, list[TokenOutput]] = {request_id: [] for request_id in request_ids}
    open_ids = set(request_ids)
    deadline = time.monotonic() + 20
    while open_ids:
        assert time.monotonic() < deadline, f"no end of {open_ids}"
        for output in client.recv(timeout=1):
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                open_ids.remove(output.request_id)
    return outputs


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_tokens_come_back_with_one_finish_each(client: EngineClient) -> None:
    client.add([fake_request("a", 1, 2), fake_request("b", 5, max_tokens=2)])
    outputs = receive(client, ["a", "b"])
    tokens = {i: [t for o in its for t in o.new_token_ids] for i, its in outputs.items()}
    assert tokens == {"a": [3, 4, 5, 6], "b": [6, 7]}
    assert outputs["a"][-1].finish_reason is FinishReason.LENGTH
    assert client.recv(timeout=0) == []


def test_a_refused_request_is_answered_and_others_are_not_harmed(client: EngineClient) -> None:
    client.add([fake_request("bad", *range(500)), fake_request("good", 1)])
    outputs = receive(client, ["bad", "good"])
    assert [o.finish_reason for o in outputs["bad"]] == [FinishReason.ERROR]
    assert "max_model_len" in (outputs["bad"][0].error or "")
    assert sum(len(o.new_token_ids) for o in outputs["good"]) == 4


def test_an_aborted_request_ends_once_with_abort(client: EngineClient) -> None:
    client.add([fake_request("long", SLOW_TOKEN, max_tokens=90)])
    client.abort(["long", "unknown"])
    client.abort(["long"])
    outputs = receive(client, ["long"])
    assert outputs["long"][-1].finish_reason is FinishReason.ABORT
    assert client.recv(timeout=0.2) == []


def test_an_id_in_flight_is_refused_and_a_finished_one_may_return(client: EngineClient) -> None:
    client.add([fake_request("same", SLOW_TOKEN, max_tokens=2)])
    with pytest.raises(InvalidRequest, match="'same'"):
        client.add([fake_request("same", 1)])
    receive(client, ["same"])
    client.add([fake_request("same", 1)])
    assert sum(len(o.new_token_ids) for o in receive(client, ["same"])["same"]) == 4


def test_control_calls_are_answered(client: EngineClient) -> None:
    assert client.control("stats")["num_running"] == 0
    assert client.control("reset_prefix_cache") == {"is_reset": 1.0}


def test_the_client_knows_the_sizes_of_its_core(client: EngineClient) -> None:
    assert (client.ready.max_model_len, client.ready.numerics_id) == (100, "fake")


def test_after_close_every_call_raises() -> None:
    client = make_in_process()
    client.close()
    client.close()
    for call in (lambda: client.add([]), client.recv, lambda: client.control("stats")):
        with pytest.raises(EngineDead, match="closed"):
            call()


def test_a_failing_step_kills_the_in_process_engine() -> None:
    client = make_in_process()
    client.add([fake_request("r", RAISE_TOKEN)])
    for _ in range(2):
        with pytest.raises(EngineDead, match="on fire"):
            client.recv()


def test_the_in_process_client_needs_neither_msgspec_nor_zmq() -> None:
    code = (
        "import sys; sys.modules.update(msgspec=None, zmq=None)\n"
        "import nano.engine.client\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_request_is_a_message_so_that_the_heart_can_beat_between(
    shared_subprocess: SubprocessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[ToCore | FromCore] = []
    module = "nano.engine.socket_client"
    monkeypatch.setattr(f"{module}.encode", lambda message: sent.append(message) or encode(message))
    request_ids = ["first", "second", "third"]
    shared_subprocess.add([fake_request(request_id, 1) for request_id in request_ids])
    receive(shared_subprocess, request_ids)
    sizes = [len(message.requests) for message in sent if isinstance(message, AddRequests)]
    assert sizes == [1, 1, 1]


def test_recv_waits_no_longer_than_its_timeout(shared_subprocess: SubprocessClient) -> None:
    assert shared_subprocess.recv(timeout=0.01) == []


def test_a_slow_step_and_a_patient_caller_meet(shared_subprocess: SubprocessClient) -> None:
    shared_subprocess.add([fake_request("slow", SLOW_TOKEN, max_tokens=1)])
    assert shared_subprocess.recv()[0].new_token_ids == [SLOW_TOKEN + 1]


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("damaged", CheckpointError, "^model.safetensors is damaged$"),
        ("raises", EngineDead, "RuntimeError: no such device"),
        ("exits", EngineDead, "exited with status 3"),
    ],
)
def test_what_goes_wrong_while_loading_is_raised_by_the_constructor(
    path: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_subprocess(path)


@pytest.mark.parametrize(
    ("token_id", "words"), [(RAISE_TOKEN, "on fire"), (EXIT_TOKEN, "exited with status 7")]
)
def test_a_core_that_dies_in_a_step_fails_everyone_with_the_reason(
    token_id: int, words: str
) -> None:
    client = make_subprocess()
    client.add([fake_request("good", 1, max_tokens=90), fake_request("bad", token_id)])
    with pytest.raises(EngineDead, match=words):
        receive(client, ["good", "bad"])
    for call in (lambda: client.add([]), client.recv, lambda: client.control("stats")):
        with pytest.raises(EngineDead, match=words):
            call()
    client.close()
    assert not is_running(client.pid)


def test_a_killed_core_wakes_every_waiting_caller() -> None:
    client = make_subprocess()
    client.add([fake_request("r", SLOW_TOKEN, max_tokens=1)])
    receive(client, ["r"])
    errors: list[Exception] = []

    def wait() -> None:
        try:
            client.recv()
        except EngineDead as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    os.kill(client.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert len(errors) == 3
    assert "killed by signal 9" in str(errors[0])
    client.close()


def test_close_leaves_no_process_and_no_folder() -> None:
    client = make_subprocess()
    client.add([fake_request("r", SLOW_TOKEN, max_tokens=90)])
    client.close()
    client.close()
    assert not is_running(client.pid)
    assert not Path(client.folder).exists()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_core_outlives_a_front_end_that_is_killed(signum: int) -> None:
    code = (
        "import time; from tests.engine.test_client import make_subprocess\n"
        "client = make_subprocess(); print(client.pid, client.folder, flush=True); time.sleep(60)"
    )
    front_end = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert front_end.stdout is not None
    pid, folder = front_end.stdout.readline().split()
    assert is_running(int(pid))
    front_end.send_signal(signum)
    front_end.wait(10)
    wait_until(lambda: not is_running(int(pid)))
    assert not Path(folder).exists()
    front_end.stdout.close()


@pytest.mark.slow
def test_a_front_end_killed_while_the_core_loads_leaves_none() -> None:
    code = (
        "from tests.engine import test_client\n"
        "import nano.engine.core_process as s, subprocess as p\n"
        "popen = p.Popen\n"
        "def tell(*args, **kwargs):\n"
        "    process = popen(*args, **kwargs); print(process.pid, flush=True); return process\n"
        "s.subprocess.Popen = tell\n"
        "test_client.make_subprocess('never')"
    )
    front_end = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert front_end.stdout is not None
    pid = int(front_end.stdout.readline())
    front_end.kill()
    front_end.wait(10)
    wait_until(lambda: not is_running(pid))
    front_end.stdout.close()


@pytest.mark.slow
def test_a_stopped_core_counts_as_dead() -> None:
    client = make_subprocess()
    os.kill(client.pid, signal.SIGSTOP)
    with pytest.raises(EngineDead, match="no heartbeat for 5 s"):
        client.control("stats")
    client.close()
    assert not is_running(client.pid)


class TestWatchdog:
    """On a clock of its own: looks every 0.2 s, beats every second."""

    def run(self, watchdog: Watchdog, start: float, seconds: float, **beat: float) -> str | None:
        for i in range(int(seconds * 5)):
            if beat and i % 5 == 0:
                watchdog.heard(EngineHeartbeat(beat.get("step_started"), beat["predicted"]))
            fault = watchdog.look(start + i / 5)
            if fault is not None:
                return fault
        return None

    def test_a_beating_idle_core_is_alive_forever(self) -> None:
        assert self.run(Watchdog(0.0), 0.0, 300.0, predicted=0.1) is None

    def test_five_seconds_of_silence_are_death(self) -> None:
        assert self.run(Watchdog(0.0), 0.0, 4.9) is None
        assert self.run(Watchdog(0.0), 0.0, 5.5) == "no heartbeat for 5 s"

    def test_a_step_of_more_than_thirty_seconds_is_death(self) -> None:
        beat = {"step_started": 1.0, "predicted": 0.1}
        assert self.run(Watchdog(0.0), 0.0, 29.0, **beat) is None
        fault = self.run(Watchdog(0.0), 0.0, 32.0, **beat)
        assert fault == "one step has taken more than 30 s"

    def test_a_core_whose_steps_are_slow_by_nature_gets_twenty_of_them(self) -> None:
        beat = {"step_started": 1.0, "predicted": 3.0}
        assert self.run(Watchdog(0.0), 0.0, 59.0, **beat) is None
        assert self.run(Watchdog(0.0), 0.0, 62.0, **beat) == "one step has taken more than 60 s"

    def test_many_short_steps_are_not_one_long_one(self) -> None:
        watchdog = Watchdog(0.0)
        for start in range(0, 100, 10):
            beat = {"step_started": float(start), "predicted": 0.1}
            assert self.run(watchdog, float(start), 10.0, **beat) is None

    def test_time_in_which_nobody_watched_does_not_count(self) -> None:
        watchdog = Watchdog(0.0)
        watchdog.heard(EngineHeartbeat(1.0, 0.1))
        assert watchdog.look(0.2) is None
        assert watchdog.look(3600.0) is None
        assert watchdog.look(3600.2) is None
