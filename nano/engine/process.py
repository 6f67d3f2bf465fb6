"""The engine core in its own process: `python -m nano.engine.process --folder DIR --config JSON`.

One thread owns the core and a ROUTER socket on `DIR/core`; it answers each front end by its socket
identity. A second thread publishes heartbeats on `DIR/heartbeat`. Stdin is a pipe from the process
that started this one: its end is the order to leave, so no core outlives its parent. SIGTERM and
SIGINT are not: whoever sends them to every process of a server wants the requests in flight to
finish, and the one that started this core says when they have.

A front end says `HELLO` when it connects (the answer is `EngineReady`, or `EngineFailure` if the
model does not load) and `GOODBYE` when it leaves; all else is a message of `codec.py`. Requests of
a front end that leaves, or that a reply can no longer reach, are aborted.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import zmq

from nano.config import EngineConfig
from nano.engine.codec import GOODBYE, HELLO, CodecError, decode, encode
from nano.engine.core import EngineCore, build_core
from nano.engine.messages import (
    AbortRequests,
    AddRequests,
    ControlReply,
    ControlRequest,
    EngineFailure,
    EngineHeartbeat,
    EngineOutputs,
    EngineRequest,
    FromCore,
)
from nano.errors import NanoError
from nano.log import get_logger, setup_logging
from nano.outputs import TokenOutput

logger = get_logger("nano.engine.process")  # run as a program, this module is __main__

HEARTBEAT_SECONDS = 1.0
IDLE_POLL_MS = 200  # an idle core notices a signal within this
INBOX_SECONDS = 0.1  # that reading messages may hold up those who wait for a step
PARENT_GRACE_SECONDS = 5.0  # for a step in progress when the parent is gone
FAILURE_GRACE_MS = 3000  # for a front end to connect and hear why loading failed
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
LEAVE_SIGNAL = signal.SIGUSR1  # the order to leave, within this process


class Heart(threading.Thread):
    """Publishes an `EngineHeartbeat` every second. The core's thread sets `step_started`.

    A thread of its own, so that a long step does not look like a dead process: the native kernels
    that make steps long release the interpreter lock.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, seconds: float):
        super().__init__(name="heartbeat", daemon=True)
        self.step_started: float | None = None
        self._predicted_step_seconds = seconds
        self._socket = context.socket(zmq.PUB)
        self._socket.linger = 0
        self._socket.bind(address)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            beat = EngineHeartbeat(self.step_started, self._predicted_step_seconds)
            self._socket.send(encode(beat))
            self._stopped.wait(HEARTBEAT_SECONDS)
        self._socket.close()

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class CoreServer:
    """Owns the core, who is connected, and whose request is whose. Single-threaded.

    Inside the core a request is called `<identity>/<request id>`: two front ends may use the same
    id.
    """

    def __init__(self, core: EngineCore, router: zmq.Socket[bytes], heart: Heart):
        self.core = core
        self.router = router
        self.heart = heart
        self.is_stopping = False
        self._front_ends: set[bytes] = set()
        self._owner_of: dict[str, bytes] = {}  # internal request id -> identity

    def run(self) -> None:
        """Serve until told to stop. Raises what a step raises, after telling every front end."""
        try:
            while not self.is_stopping:
                self._drain_inbox(wait_ms=0 if self.core.has_work else IDLE_POLL_MS)
                if self.core.has_work:
                    self._step()
                else:
                    self.core.idle()
        except Exception as error:
            self._fail_all(f"{type(error).__name__}: {error}")
            raise
        self._fail_all("it was told to stop")

    def _step(self) -> None:
        self.heart.step_started = time.monotonic()
        outputs = self.core.step()
        self.heart.step_started = None
        self._send_outputs(outputs)

    def _drain_inbox(self, wait_ms: int) -> None:
        started = time.monotonic() + wait_ms / 1000
        while not self.is_stopping and self.router.poll(wait_ms):
            identity, *frames = self.router.recv_multipart()
            self._handle(identity, b"".join(frames))
            if time.monotonic() - started > INBOX_SECONDS:
                break
            wait_ms = 0

    def _handle(self, identity: bytes, data: bytes) -> None:
        if data == HELLO:
            self._front_ends.add(identity)
            self._send(identity, self.core.ready)
            return
        if data == GOODBYE:
            self._forget(identity)
            return
        try:
            message = decode(data)
        except CodecError as error:
            logger.warning("dropped %d bytes from a front end: %s", len(data), error)
            return
        match message:
            case AddRequests(requests):
                for request in requests:
                    self._add(identity, request)
            case AbortRequests(request_ids):
                self._send_outputs(self.core.abort([_inside(identity, i) for i in request_ids]))
            case ControlRequest(call_id, "shutdown"):
                self._send(identity, ControlReply(call_id, {}))
                self.is_stopping = True
            case ControlRequest(call_id, "reset_prefix_cache" | "stats" as method):
                self._send(identity, ControlReply(call_id, self.core.control(method)))
            case _:
                logger.warning("dropped a %s from a front end", type(message).__name__)

    def _add(self, identity: bytes, request: EngineRequest) -> None:
        request.request_id = _inside(identity, request.request_id)
        if request.request_id in self._owner_of:
            # Answering would end the request that holds the id, so only the log can tell.
            logger.warning("dropped a second request %s", request.request_id)
            return
        self._owner_of[request.request_id] = identity
        refusal = self.core.add(request)
        if refusal is not None:
            self._send_outputs([refusal])

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        by_identity: dict[bytes, list[TokenOutput]] = {}
        for output in outputs:
            identity = self._owner_of.get(output.request_id)
            if output.finish_reason is not None:
                self._owner_of.pop(output.request_id, None)
            if identity is not None:
                output.request_id = output.request_id.partition("/")[2]
                by_identity.setdefault(identity, []).append(output)
        for identity, its_outputs in by_identity.items():
            self._send(identity, EngineOutputs(its_outputs))

    def _send(self, identity: bytes, message: FromCore) -> None:
        try:
            self.router.send_multipart([identity, encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        """A front end is gone: abort what it asked for."""
        self._front_ends.discard(identity)
        request_ids = [i for i, owner in self._owner_of.items() if owner == identity]
        for request_id in request_ids:
            del self._owner_of[request_id]
        self.core.abort(request_ids)
        if request_ids:
            logger.info("a front end left; aborted its %d requests", len(request_ids))

    def _fail_all(self, reason: str) -> None:
        self._owner_of.clear()  # so that _forget, on the way, does not reach into a broken core
        for identity in list(self._front_ends):
            self._send(identity, EngineFailure(reason))


def _inside(identity: bytes, request_id: str) -> str:
    return f"{identity.hex()}/{request_id}"


def serve_core(folder: str, load: Callable[[], EngineCore]) -> int:
    """Load a core and serve it on the sockets of `folder`. Returns the exit status."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.router_mandatory = True  # a reply that cannot be delivered is an error, not silence
    router.sndhwm = router.rcvhwm = 0  # never block on a slow front end, never drop a token
    router.linger = 1000
    router.bind(f"ipc://{folder}/core")
    try:
        try:
            core = load()
        except Exception as error:
            if not isinstance(error, NanoError):
                logger.exception("the engine core failed to start")
            _refuse_front_ends(router, f"{type(error).__name__}: {error}")
            return 1
        heart = Heart(context, f"ipc://{folder}/heartbeat", core.step_seconds)
        server = CoreServer(core, router, heart)
        _on_order_to_leave(lambda: setattr(server, "is_stopping", True))
        heart.start()
        try:
            server.run()
        except Exception:
            logger.exception("the engine core died")
            return 1
        finally:
            heart.stop()
            core.close()
    finally:
        router.close()
        context.term()
    return 0


def _refuse_front_ends(router: zmq.Socket[bytes], reason: str) -> None:
    """Loading failed: tell whoever has said hello, or does so soon."""
    wait_ms = FAILURE_GRACE_MS
    while router.poll(wait_ms):
        identity, *_ = router.recv_multipart()
        router.send_multipart([identity, encode(EngineFailure(reason))])
        wait_ms = 0


def _on_order_to_leave(leave: Callable[[], None]) -> None:
    def handler(signum: int, frame: FrameType | None) -> None:
        leave()

    signal.signal(LEAVE_SIGNAL, handler)


def _leave_stop_signals_to_parent() -> None:
    def handler(signum: int, frame: FrameType | None) -> None:
        logger.debug("signal %d is for the process that started this one", signum)

    # Not SIG_IGN, which a compiler started from here would inherit.
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)


def _leave_with_parent(folder: str) -> None:
    """End this process when the one that started it ends, however that happens."""
    if sys.platform == "linux":
        # A fork of the parent may hold the pipe open after its death. The kernel watches the
        # parent's *thread*; a client starts us from one that lives as long as itself.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LEAVE_SIGNAL)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), LEAVE_SIGNAL)
        time.sleep(PARENT_GRACE_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)  # a step that takes longer has nobody to compute for

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(
    argv: Sequence[str] | None = None,
    load: Callable[[EngineConfig], EngineCore] = build_core,
) -> int:
    """Entry point. `load` makes the core of a resolved config."""
    parser = argparse.ArgumentParser(prog="nano.engine.process")
    parser.add_argument("--folder", required=True, help="for the two sockets; removed at the end")
    parser.add_argument("--config", required=True, help="a resolved EngineConfig, as JSON")
    parser.add_argument("--log-level", default=None)
    args = parser.parse_args(argv)
    try:
        _leave_stop_signals_to_parent()
        _on_order_to_leave(lambda: sys.exit(1))  # while loading, the folder is all there is to tidy
        _leave_with_parent(args.folder)  # whose order may come at once
        setup_logging("core", args.log_level)
        config = EngineConfig.from_sections(json.loads(args.config))
        return serve_core(args.folder, lambda: load(config))
    finally:
        _on_order_to_leave(lambda: None)  # leaving already; nothing may interrupt the tidying up
        shutil.rmtree(args.folder, ignore_errors=True)  # the parent may be gone


if __name__ == "__main__":
    sys.exit(main())
