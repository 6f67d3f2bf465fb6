"""AsyncEngine: the engine as an asyncio program sees it. Torch-free.

Owns the client, everything in flight, and what the server's state is. Tokenisation runs in the
loop's thread pool, waiting for the core in a thread of its own, which also finds another core when
one is lost; all other state is touched by the event loop only.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from nano.checkpoint.hf_config import load_decoder_config
from nano.config import EngineConfig
from nano.engine.client import EngineClient
from nano.engine.input_processor import InputProcessor, PreparedRequest
from nano.engine.output_processor import OutputKind, OutputProcessor
from nano.engine.timeline import RequestObserver
from nano.engine.tokenizer import Tokenizer
from nano.errors import EngineDead, EngineUnavailable, NanoError
from nano.log import get_logger
from nano.outputs import TokenOutput
from nano.resolve import resolve
from nano.serve.generation import Generation
from nano.serve.processes.cores import Connect, Cores

logger = get_logger(__name__)
_Result = TypeVar("_Result")


class EngineState(StrEnum):
    """What the engine can do for a new request: something in `READY` only."""

    LOADING = "loading"  # a core takes the place of one that died
    READY = "ready"
    DRAINING = "draining"  # what is in flight is finished, and that is all
    DEAD = "dead"  # for good


class AsyncEngine:
    """A front end in an event loop. `start` within the loop before use, `close` at the end.

    When its core dies, all that is in flight fails with `EngineDead`, and `connect` is asked for
    another. `fault` says why there is none and never will be, or is None.
    """

    def __init__(
        self,
        client: EngineClient,
        input_processor: InputProcessor,
        model_max_tokens: int | None = None,
        connect: Connect | None = None,
    ):
        """`model_max_tokens` is the model's own default for chat; None: the rest of the context.

        `client` is the first that `connect` gave.
        """
        self.client = client
        self.input_processor = input_processor
        self.tokenizer = input_processor.tokenizer
        self.model_max_tokens = model_max_tokens
        self.fault: str | None = None
        self._connect = connect
        self._lost: str | None = None  # why the last core died, until there is another
        self._is_draining = False
        self._end: EngineUnavailable | None = None  # what everything ended with
        self._output_processor = OutputProcessor(self.tokenizer)
        self._generations: dict[str, Generation] = {}  # by request id
        self._arrived: deque[list[TokenOutput]] = deque()  # from the core, not yet looked at
        self._will_deliver = False  # the loop has been asked to
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        log_level: str | None = None,
        chat_template: str | None = None,
        connect: Connect | None = None,
    ) -> "AsyncEngine":
        """Load a model in a core process. Raises `ConfigError`, `CheckpointError`, `EngineDead`.

        `chat_template` (Jinja) replaces the model's own. `connect` finds a core of that `config`;
        without it, one is started, and only one.
        """
        config = resolve(config)
        connect = connect or Cores(config, num_restarts=0, log_level=log_level).connect
        decoder = load_decoder_config(Path(config.model.path))
        tokenizer = Tokenizer.from_folder(
            Path(config.model.tokenizer or config.model.path), chat_template
        )
        max_tokens = None
        if config.model.generation_config == "auto" and "max_tokens" in decoder.default_sampling:
            max_tokens = int(decoder.default_sampling["max_tokens"])
        client = connect(None)
        input_processor = InputProcessor(
            config,
            decoder,
            tokenizer,
            num_kv_slots=client.ready.num_kv_slots,
            proposers=client.ready.proposers,
            draws_random_seeds=True,
        )
        return cls(client, input_processor, max_tokens, connect)

    @property
    def state(self) -> EngineState:
        if self.fault is not None:
            return EngineState.DEAD
        if self._is_draining:
            return EngineState.DRAINING
        return EngineState.READY if self._lost is None else EngineState.LOADING

    @property
    def num_in_flight(self) -> int:
        """Prompts whose answer is not finished."""
        return len(self._generations)

    def check_ready(self) -> None:
        """Raises `EngineUnavailable` unless the state is `READY`: a request is not to begin."""
        match self.state:
            case EngineState.DEAD:
                raise EngineDead(self.fault or "")
            case EngineState.DRAINING:
                raise EngineUnavailable("the server is shutting down", "shutting_down")
            case EngineState.LOADING:
                raise EngineUnavailable(f"{self._lost}; another one is loading", "engine_loading")

    @property
    def fingerprint(self) -> str:
        """Names how the core computes: equal fingerprint and seed, equal tokens."""
        return self.client.ready.numerics_id

    def observe(self, observer: RequestObserver) -> None:
        """Tell `observer` of every completion from now on."""
        self._output_processor.observers.append(observer)

    def start(self) -> None:
        """Begin to listen to the core, on behalf of the running event loop."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, name="engine-listener", daemon=True).start()

    async def prepare(self, work: Callable[[], _Result]) -> _Result:
        """Run `work`, which tokenises or writes text, off the event loop. Raises what it raises."""
        return await asyncio.to_thread(work)

    def generate(self, prepared: Sequence[PreparedRequest], kind: OutputKind) -> Generation:
        """Send prompts to the core, while draining too. Close the result when done with it.

        Raises `EngineUnavailable`.
        """
        if self._end is not None:
            raise self._end
        if self._lost is not None:
            raise EngineDead(self._lost)
        generation = Generation([request.request_id for request in prepared], self._abort)
        for request in prepared:
            self._output_processor.register(request, kind)
            self._generations[request.request_id] = generation
        try:
            self.client.add([child for request in prepared for child in request.children])
        except EngineDead as error:
            self._lose(str(error))
            raise
        return generation

    def drain(self) -> None:
        """From now on, only what has begun is finished."""
        self._is_draining = True

    def end(self, error: EngineUnavailable) -> None:
        """End all that is in flight, and all that was about to be, with `error`."""
        self._is_draining = True
        self._end = self._end or error
        self._fail_all(error)

    def fail(self, fault: str) -> None:
        """Give up: whoever waits, and whoever comes, gets `EngineDead` with this reason."""
        if self._end is None:  # else it is what was wanted
            self.fault = fault
            self.end(EngineDead(fault))

    async def close(self) -> None:
        """End the core; whoever still waits gets `EngineUnavailable`."""
        self.end(EngineUnavailable("the server is shutting down", "shutting_down"))
        await asyncio.to_thread(self.client.close)

    def _fail_all(self, error: EngineUnavailable) -> None:
        self._output_processor.fail_all(str(error), time.monotonic())
        for generation in set(self._generations.values()):
            generation.fail(error)
        self._generations.clear()

    def _listen(self) -> None:
        """The life of the listening thread: one core after the other."""
        assert self._loop is not None
        call, client = self._loop.call_soon_threadsafe, self.client
        with contextlib.suppress(RuntimeError):  # the loop was closed before the engine
            while True:
                lost = self._relay(client)
                call(self._lose, lost)
                if self._connect is None or self._is_draining:
                    call(self.fail, lost)
                    return
                try:
                    client.close()
                    client = self._connect(lost)
                except NanoError as error:
                    call(self.fail, str(error))
                    return
                call(self._resume, client)

    def _relay(self, client: EngineClient) -> str:
        """Pass on what a core says until it dies; why it did."""
        assert self._loop is not None
        while True:
            try:
                outputs = client.recv()
            except EngineDead as error:
                return str(error)
            self._arrived.append(outputs)
            # Once for all that comes until then: the loop has other things to do in between.
            if not self._will_deliver:
                self._will_deliver = True
                self._loop.call_soon_threadsafe(self._deliver)

    def _lose(self, reason: str) -> None:
        self._lost = reason
        self._fail_all(EngineDead(reason))

    def _resume(self, client: EngineClient) -> None:
        self.client = client
        # Its memory was measured anew.
        self.input_processor.num_kv_slots = client.ready.num_kv_slots
        self._lost = None
        logger.info("serving again")

    def _deliver(self) -> None:
        """Hand out all that has arrived: when that takes longer than a step, several steps' news
        make one output.
        """
        self._will_deliver = False  # first: what comes from now on may be too late for this time
        outputs: list[TokenOutput] = []
        while self._arrived:
            outputs += self._arrived.popleft()
        try:
            for output in self._output_processor.process(outputs, time.monotonic()):
                generation = self._generations[output.request_id]
                if output.finished:
                    del self._generations[output.request_id]
                generation.put(output)
        except Exception as error:  # our bug: better an end with a reason than callers who hang
            logger.exception("the front end cannot process what the core sent")
            self.fail(f"{type(error).__name__}: {error}")
        self._abort_in_core()

    def _abort(self, request_ids: Sequence[str]) -> None:
        """The caller of these requests went away."""
        for request_id in request_ids:
            if self._generations.pop(request_id, None) is not None:
                self._output_processor.abort(request_id, time.monotonic())
        self._abort_in_core()

    def _abort_in_core(self) -> None:
        """Tell the core what it computes for nobody."""
        if abort_ids := self._output_processor.take_abort_ids():
            with contextlib.suppress(EngineDead):  # `_listen` hears of it too
                self.client.abort(abort_ids)
