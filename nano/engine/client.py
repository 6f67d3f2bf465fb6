"""EngineClient: how a front end talks to an engine core, and the client without a process.

`InProcessClient` needs neither msgspec nor pyzmq. The client of a core in a process of its own is
`SubprocessClient` in subprocess_client.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from nano.engine.core import ControlMethod, EngineCore
from nano.engine.messages import (
    AbortRequests,
    AddRequests,
    ControlReply,
    ControlRequest,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    FromCore,
    ToCore,
)
from nano.errors import EngineDead, InvalidRequest
from nano.outputs import TokenOutput

Wire = Callable[[ToCore | FromCore], ToCore | FromCore]


class EngineClient(ABC):
    """One front end's line to one core.

    Every request that `add` takes is answered through `recv` until its TokenOutput with a
    finish_reason, which comes exactly once, whether it ends, is aborted or fails. When the core
    dies every call, waiting or later, raises `EngineDead`.
    """

    ready: EngineReady  # what the core said when it had loaded its model

    @abstractmethod
    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hand over requests. Raises `InvalidRequest` if an id is in flight already."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early, with finish_reason "abort". Ids not in flight are ignored."""

    @abstractmethod
    def recv(self, timeout: float | None = None) -> list[TokenOutput]:
        """The news since the last call, waiting for some up to `timeout` seconds; [] if none."""

    @abstractmethod
    def control(self, method: ControlMethod) -> dict[str, float]:
        """A maintenance call: `EngineCore.control`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the core. A second call does nothing."""


class LiveRequests(set[str]):
    """The ids that a client has in flight."""

    def enter(self, requests: Sequence[EngineRequest]) -> None:
        """Raises `InvalidRequest`, and takes none, if one is in flight or comes twice."""
        request_ids: set[str] = set()
        for request in requests:
            if request.request_id in self or request.request_id in request_ids:
                raise InvalidRequest(
                    f"request_id {request.request_id!r} is in flight already", "request_id"
                )
            request_ids.add(request.request_id)
        self |= request_ids

    def leave(self, outputs: Sequence[TokenOutput]) -> None:
        """Drop those that `outputs` finish."""
        self -= {output.request_id for output in outputs if output.finish_reason is not None}


class InProcessClient(EngineClient):
    """Owns a core and calls it directly; `recv` runs one step. Not thread-safe.

    `wire` is applied to every message in both directions. Tests give it the codec, so that what
    runs in one process is known to survive the trip between two.
    """

    def __init__(self, core: EngineCore, wire: Wire | None = None):
        self.ready = core.ready
        self._core = core
        self._wire = wire
        self._live = LiveRequests()
        self._outbox: list[TokenOutput] = []
        self._fault: str | None = None
        self._is_closed = False

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._check_alive()
        self._live.enter(requests)
        message = self._over_wire(AddRequests(list(requests)))
        assert isinstance(message, AddRequests)
        for request in message.requests:
            refusal = self._core.add(request)
            if refusal is not None:
                self._outbox.append(refusal)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._check_alive()
        message = self._over_wire(AbortRequests(list(request_ids)))
        assert isinstance(message, AbortRequests)
        self._outbox += self._core.abort(message.request_ids)

    def recv(self, timeout: float | None = None) -> list[TokenOutput]:
        self._check_alive()
        outputs, self._outbox = self._outbox, []
        if not outputs and self._core.has_work:
            try:
                outputs = self._core.step()
            except Exception as error:
                self._fault = f"{type(error).__name__}: {error}"
                raise EngineDead(f"the engine core died: {self._fault}") from error
        self._live.leave(outputs)
        message = self._over_wire(EngineOutputs(outputs))
        assert isinstance(message, EngineOutputs)
        return message.outputs

    def control(self, method: ControlMethod) -> dict[str, float]:
        self._check_alive()
        request = self._over_wire(ControlRequest(0, method))
        assert isinstance(request, ControlRequest)
        reply = self._over_wire(ControlReply(request.call_id, self._core.control(method)))
        assert isinstance(reply, ControlReply)
        return reply.result

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._fault = self._fault or "it was closed"
            self._core.close()

    def _over_wire(self, message: ToCore | FromCore) -> ToCore | FromCore:
        return message if self._wire is None else self._wire(message)

    def _check_alive(self) -> None:
        if self._fault is not None:
            raise EngineDead(f"the engine core is dead: {self._fault}")
