"""SubprocessClient: an engine core in a process of its own, over pyzmq."""

import atexit
import itertools
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import zmq

from nano.config import EngineConfig
from nano.engine.client import EngineClient, LiveRequests
from nano.engine.codec import GOODBYE, HELLO, decode, encode
from nano.engine.core import ControlMethod
from nano.engine.messages import (
    AbortRequests,
    AddRequests,
    ControlReply,
    ControlRequest,
    EngineFailure,
    EngineHeartbeat,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ToCore,
)
from nano.errors import CheckpointError, ConfigError, EngineDead
from nano.log import get_logger
from nano.outputs import TokenOutput

logger = get_logger(__name__)

CORE_COMMAND = (sys.executable, "-m", "nano.engine.process")
LOOK_SECONDS = 0.2  # between two looks at the process and its heartbeat
SILENCE_LIMIT_SECONDS = 5.0
STEP_LIMIT_SECONDS = 30.0  # or STEP_LIMIT_FACTOR predicted steps, if that is longer
STEP_LIMIT_FACTOR = 20
CLOSE_GRACE_SECONDS = 5.0  # for the step in progress
MAX_SOCKET_PATH = 100  # bytes a Unix socket's path can safely have
OWN_ERRORS = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}


class Watchdog:
    """Tells from heartbeats whether the core is stuck.

    Only time spent watching counts: while this process itself was stopped (a debugger, Ctrl-Z, a
    suspended machine) it cannot know what the core did.
    """

    def __init__(self, now: float):
        self._last_look = now
        self._silence = 0.0
        self._step_started: float | None = None
        self._step_seconds = 0.0
        self._step_limit = STEP_LIMIT_SECONDS

    def heard(self, beat: EngineHeartbeat) -> None:
        self._silence = 0.0
        if beat.step_started != self._step_started:
            self._step_started = beat.step_started
            self._step_seconds = 0.0
        self._step_limit = max(STEP_LIMIT_SECONDS, STEP_LIMIT_FACTOR * beat.predicted_step_seconds)

    def look(self, now: float) -> str | None:
        """What is wrong with the core at time `now`, in words, or None."""
        watched = min(now - self._last_look, 5 * LOOK_SECONDS)
        self._last_look = now
        self._silence += watched
        if self._silence > SILENCE_LIMIT_SECONDS:
            return f"no heartbeat for {SILENCE_LIMIT_SECONDS:g} s"
        if self._step_started is not None:
            self._step_seconds += watched
            if self._step_seconds > self._step_limit:
                return f"one step has taken more than {self._step_limit:g} s"
        return None


class SubprocessClient(EngineClient):
    """Starts a core, owns its process, and speaks to it. Thread-safe.

    `config` is resolved (`nano.resolve`). The constructor returns when the model is loaded,
    or raises what went wrong there: `ConfigError`, `CheckpointError` or `EngineDead`. One I/O
    thread starts the process, owns the sockets and watches the process; callers leave messages
    with it and wait for its news. `close`, the end of the program, and its death by any signal all
    end the core.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] = CORE_COMMAND,
        log_level: str | None = None,
    ):
        self._folder = _private_folder()
        self._command = [*command, "--folder", self._folder]
        self._command += ["--config", json.dumps(config.to_sections())]
        if log_level is not None:
            self._command += ["--log-level", log_level]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inlet = self._context.socket(zmq.PUSH)  # to the I/O thread
        self._inlet.sndhwm = 0
        self._outlet = self._context.socket(zmq.PULL)  # its end
        self._outlet.rcvhwm = 0
        self._outlet.bind("inproc://inlet")
        self._inlet.connect("inproc://inlet")

        self._news = threading.Condition()  # guards everything down to _call_ids, and the inlet
        self._outputs: list[TokenOutput] = []
        self._live = LiveRequests()
        self._calls: dict[int, Future[dict[str, float]]] = {}
        self._call_ids = itertools.count()
        self._fault: str | None = None
        self._is_closing = False

        self._started: Future[EngineReady] = Future()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self.ready = self._started.result()
        except BaseException:  # Ctrl-C while loading, too
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The core's process id, for tests and logs."""
        assert self._process is not None
        return self._process.pid

    def add(self, requests: Sequence[EngineRequest]) -> None:
        # One message each: the core's heart must get to beat while it reads thousands of them.
        messages = [encode(AddRequests([request])) for request in requests]
        with self._news:
            self._check_alive()
            self._live.enter(requests)
            for message in messages:
                self._inlet.send(message)

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._news:
            self._check_alive()
            live = [request_id for request_id in request_ids if request_id in self._live]
            if live:
                self._leave(AbortRequests(live))

    def recv(self, timeout: float | None = None) -> list[TokenOutput]:
        with self._news:
            self._news.wait_for(lambda: self._outputs or self._fault is not None, timeout)
            if not self._outputs:
                self._check_alive()
            outputs, self._outputs = self._outputs, []
            return outputs

    def control(self, method: ControlMethod) -> dict[str, float]:
        call: Future[dict[str, float]] = Future()
        with self._news:
            self._check_alive()
            call_id = next(self._call_ids)
            self._calls[call_id] = call
            self._leave(ControlRequest(call_id, method))
        return call.result()

    def close(self) -> None:
        with self._news:
            if self._is_closing:
                return
            self._is_closing = True
            if self._fault is None:
                self._inlet.send(b"")  # wakes the I/O thread
        self._thread.join()
        atexit.unregister(self.close)
        self._inlet.close(linger=0)
        self._context.term()

    def _check_alive(self) -> None:
        if self._fault is not None:
            raise EngineDead(f"the engine core is dead: {self._fault}")
        if self._is_closing:
            raise EngineDead("the engine core is dead: it was closed")

    def _leave(self, message: ToCore) -> None:
        self._inlet.send(encode(message))

    # --- the I/O thread ---------------------------------------------------------------------

    def _run(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.routing_id = secrets.token_hex(4).encode()
        dealer.sndhwm = dealer.rcvhwm = 0
        heartbeat = self._context.socket(zmq.SUB)
        heartbeat.subscribe(b"")
        fault = "it was closed"
        try:
            # Not in our process group: Ctrl-C goes to the front end alone, which then closes us.
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)
            dealer.connect(f"ipc://{self._folder}/core")
            heartbeat.connect(f"ipc://{self._folder}/heartbeat")
            dealer.send(HELLO)
            fault = self._watch(self._process, dealer, heartbeat) or fault
        except Exception as error:
            logger.exception("the engine client's own thread failed")
            fault = f"{type(error).__name__}: {error}"
        finally:
            self._fail(fault)
            self._end_process()
            for socket in (dealer, heartbeat, self._outlet):
                socket.close(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        dealer: zmq.Socket[bytes],
        heartbeat: zmq.Socket[bytes],
    ) -> str | None:
        """Carry messages both ways until the core is dead (says why) or `close` is called."""
        poller = zmq.Poller()
        for socket in (dealer, heartbeat, self._outlet):
            poller.register(socket, zmq.POLLIN)
        watchdog: Watchdog | None = None  # loading never counts as stuck
        while not self._is_closing:
            exit_status = process.poll()  # before the sockets, whose last words say more
            events = dict(poller.poll(int(LOOK_SECONDS * 1000)))
            if self._outlet in events:
                dealer.send(self._outlet.recv() or GOODBYE)
            if heartbeat in events:
                beat = decode(heartbeat.recv())
                assert isinstance(beat, EngineHeartbeat)
                if watchdog is not None:
                    watchdog.heard(beat)
            if dealer in events:
                fault = self._receive(dealer.recv())
                if fault is not None:
                    return fault
                continue
            if exit_status is not None:
                return _describe_exit(exit_status)
            if watchdog is None and self._started.done():
                watchdog = Watchdog(time.monotonic())
            if watchdog is not None:
                fault = watchdog.look(time.monotonic())
                if fault is not None:
                    process.kill()  # it would not hear the order to leave
                    return fault
        return None

    def _receive(self, data: bytes) -> str | None:
        """Hand one message to whom it concerns. Returns the core's last words, if it is that."""
        match decode(data):
            case EngineOutputs(outputs):
                with self._news:
                    self._outputs += outputs
                    self._live.leave(outputs)
                    self._news.notify_all()
            case ControlReply(call_id, result):
                with self._news:
                    self._calls.pop(call_id).set_result(result)
            case EngineReady() as ready:
                self._started.set_result(ready)
            case EngineFailure(error):
                return error
        return None

    def _fail(self, fault: str) -> None:
        if not self._started.done():
            name, _, message = fault.partition(": ")
            known = OWN_ERRORS.get(name)
            error = known(message) if known else EngineDead(f"the engine did not start: {fault}")
            self._started.set_exception(error)
        elif not self._is_closing:
            logger.error("the engine core is dead: %s", fault)
        with self._news:
            self._fault = fault
            for call in self._calls.values():
                call.set_exception(EngineDead(f"the engine core is dead: {fault}"))
            self._calls.clear()
            self._news.notify_all()

    def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # the core takes this as the order to leave
        try:
            process.wait(CLOSE_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _private_folder() -> str:
    """A new folder that only this user can enter, with a path short enough for Unix sockets."""
    folder = tempfile.mkdtemp(prefix="nano-")
    if len(folder) + len("/heartbeat") > MAX_SOCKET_PATH and Path("/tmp").is_dir():
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="nano-", dir="/tmp")
    return folder


def _describe_exit(status: int) -> str:
    return f"it was killed by signal {-status}" if status < 0 else f"it exited with status {status}"
