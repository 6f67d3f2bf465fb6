"""SocketClient: a front end's line to an engine core in another process, over pyzmq."""

import atexit
import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import zmq

from nano.engine.client import EngineClient, LiveRequests
from nano.engine.codec import GOODBYE, HELLO, decode, encode
from nano.engine.core import ControlMethod
from nano.engine.core_process import CoreProcess
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
from nano.engine.watchdog import LOOK_SECONDS, Watchdog
from nano.errors import CheckpointError, ConfigError, EngineDead
from nano.log import get_logger
from nano.outputs import TokenOutput

logger = get_logger(__name__)

GOODBYE_MS = 200  # that a core which is alive takes to hear it
OWN_ERRORS = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}


class SocketClient(EngineClient):
    """Speaks to the core whose sockets are in `folder`. Thread-safe.

    The constructor returns when the core has answered, or raises what went wrong with it. Any
    number of clients may speak to a core. One of them may own its process: that one starts it,
    waits as long as its model takes to load, and ends it. The others attach to a core that has
    loaded.

    One I/O thread owns the sockets and watches the core; callers leave messages with it and wait
    for its news.
    """

    def __init__(self, folder: str, process: CoreProcess | None = None):
        self.folder = folder
        self._process = process  # None: another client's
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inlet = self._context.socket(zmq.PUSH)  # to the I/O thread
        self._inlet.sndhwm = 0
        self._outlet = self._context.socket(zmq.PULL)  # its end
        self._outlet.rcvhwm = 0
        self._outlet.bind("inproc://inlet")
        self._inlet.connect("inproc://inlet")

        self._news = threading.Condition()  # guards everything down to _is_closing, and the inlet
        self._outputs: list[TokenOutput] = []
        self._live = LiveRequests()
        self._calls: dict[int, Future[dict[str, float]]] = {}
        self._call_ids = itertools.count()
        self._fault: str | None = None
        self._is_closing = False

        self._started: Future[EngineReady] = Future()
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self.ready = self._started.result()
        except BaseException:  # Ctrl-C while loading, too
            self.close()
            raise

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
        cut = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        fault = "it was closed"
        try:
            if self._process is not None:
                self._process.start()
            dealer.connect(f"ipc://{self.folder}/core")
            heartbeat.connect(f"ipc://{self.folder}/heartbeat")
            dealer.send(HELLO)
            fault = self._watch(dealer, heartbeat, cut) or fault
            dealer.send(GOODBYE)
        except Exception as error:
            logger.exception("the engine client's own thread failed")
            fault = f"{type(error).__name__}: {error}"
        finally:
            self._fail(fault)
            if self._process is not None:
                self._process.end()
            dealer.disable_monitor()
            dealer.close(linger=GOODBYE_MS if self._process is None else 0)
            for socket in (heartbeat, self._outlet):
                socket.close(linger=0)

    def _watch(
        self,
        dealer: zmq.Socket[bytes],
        heartbeat: zmq.Socket[bytes],
        cut: zmq.Socket[bytes],
    ) -> str | None:
        """Carry messages both ways until the core is dead (says why) or `close` is called."""
        poller = zmq.Poller()
        for socket in (dealer, heartbeat, cut, self._outlet):
            poller.register(socket, zmq.POLLIN)
        # Loading never counts as stuck.
        watchdog = Watchdog(time.monotonic()) if self._process is None else None
        is_cut = False
        while not self._is_closing:
            # Before the sockets, whose last words say more.
            fault = self._process.fault() if self._process is not None else None
            if self._process is None and is_cut:
                fault = "it ended"
            events = dict(poller.poll(int(LOOK_SECONDS * 1000)))
            if self._outlet in events:
                message = self._outlet.recv()
                if message:  # else it only wakes us
                    dealer.send(message)
            if heartbeat in events:
                beat = decode(heartbeat.recv())
                assert isinstance(beat, EngineHeartbeat)
                if watchdog is not None:
                    watchdog.heard(beat)
            if cut in events:
                cut.recv_multipart()
                is_cut = True
            if dealer in events:
                last_words = self._receive(dealer.recv())
                if last_words is not None:
                    return last_words
                continue
            if fault is not None:
                return fault
            if watchdog is None and self._started.done():
                watchdog = Watchdog(time.monotonic())
            if watchdog is not None:
                fault = watchdog.look(time.monotonic())
                if fault is not None:
                    if self._process is not None:
                        self._process.kill()  # it would not hear the order to leave
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
