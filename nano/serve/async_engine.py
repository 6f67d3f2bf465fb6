"""AsyncEngine: the engine as an asyncio program sees it. Torch-free.

Owns the client and everything in flight. Tokenisation runs in the loop's thread pool, waiting for
the core in a thread of its own; all other state is touched by the event loop only.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nano.checkpoint.hf_config import load_decoder_config
from nano.config import EngineConfig
from nano.engine.client import EngineClient
from nano.engine.input_processor import InputProcessor, PreparedRequest
from nano.engine.output_processor import OutputKind, OutputProcessor
from nano.engine.subprocess_client import SubprocessClient
from nano.engine.tokenizer import Tokenizer
from nano.errors import EngineDead
from nano.log import get_logger
from nano.outputs import RequestOutput, TokenOutput
from nano.resolve import resolve

logger = get_logger(__name__)

News = tuple[int, RequestOutput] | EngineDead


class Generation:
    """What comes of the prompts of one call: an async iterator of (prompt index, output).

    Ends when every prompt has had its finished output; raises `EngineDead` if the core dies first.
    `close` aborts what is unfinished; closing a finished generation does nothing.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]):
        self._unfinished = dict(zip(request_ids, itertools.count()))  # request id -> prompt index
        self._abort = abort
        self._news: asyncio.Queue[News] = asyncio.Queue()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._unfinished:
            raise StopAsyncIteration
        news = await self._news.get()
        if isinstance(news, EngineDead):
            self._unfinished.clear()
            raise news
        if news[1].finished:
            del self._unfinished[news[1].request_id]
        return news

    def put(self, output: RequestOutput) -> None:
        index = self._unfinished.get(output.request_id)
        if index is not None:  # closed meanwhile
            self._news.put_nowait((index, output))

    def fail(self, error: EngineDead) -> None:
        self._news.put_nowait(error)

    def close(self) -> None:
        unfinished, self._unfinished = list(self._unfinished), {}
        if unfinished:
            self._abort(unfinished)


class AsyncEngine:
    """A front end in an event loop. `start` within the loop before use, `close` at the end.

    `fault` says why nothing can be asked any more, or is None.
    """

    def __init__(
        self,
        client: EngineClient,
        input_processor: InputProcessor,
        model_max_tokens: int | None = None,
    ):
        """`model_max_tokens` is the model's own default for chat; None: the rest of the context."""
        self.client = client
        self.input_processor = input_processor
        self.tokenizer = input_processor.tokenizer
        self.model_max_tokens = model_max_tokens
        self.fault: str | None = None
        self._output_processor = OutputProcessor(self.tokenizer)
        self._generations: dict[str, Generation] = {}  # by request id
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_config(cls, config: EngineConfig, log_level: str | None = None) -> "AsyncEngine":
        """Load a model in a core process. Raises `ConfigError`, `CheckpointError`, `EngineDead`."""
        config = resolve(config)
        decoder = load_decoder_config(Path(config.model.path))
        tokenizer = Tokenizer.from_folder(Path(config.model.tokenizer or config.model.path))
        max_tokens = None
        if config.model.generation_config == "auto" and "max_tokens" in decoder.default_sampling:
            max_tokens = int(decoder.default_sampling["max_tokens"])
        client = SubprocessClient(config, log_level=log_level)
        input_processor = InputProcessor(
            config,
            decoder,
            tokenizer,
            num_kv_slots=client.ready.num_kv_slots,
            proposers=client.ready.proposers,
            draws_random_seeds=True,
        )
        return cls(client, input_processor, max_tokens)

    @property
    def fingerprint(self) -> str:
        """Names how the core computes: equal fingerprint and seed, equal tokens."""
        return self.client.ready.numerics_id

    def start(self) -> None:
        """Begin to listen to the core, on behalf of the running event loop."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, name="engine-listener", daemon=True).start()

    async def prepare(self, work: Callable[[], list[PreparedRequest]]) -> list[PreparedRequest]:
        """Run `work`, which tokenises, off the event loop. Raises what it raises."""
        return await asyncio.to_thread(work)

    def generate(self, prepared: Sequence[PreparedRequest], kind: OutputKind) -> Generation:
        """Send prompts to the core. Raises `EngineDead`; close the result when done with it."""
        if self.fault is not None:
            raise EngineDead(self.fault)
        generation = Generation([request.request_id for request in prepared], self._abort)
        for request in prepared:
            self._output_processor.register(request, kind)
            self._generations[request.request_id] = generation
        try:
            self.client.add([child for request in prepared for child in request.children])
        except EngineDead as error:
            self.fail(str(error))
            raise
        return generation

    def fail(self, fault: str) -> None:
        """Give up: whoever waits, and whoever comes, gets `EngineDead` with this reason."""
        if self.fault is not None:
            return
        self.fault = fault
        self._output_processor.fail_all(fault, time.monotonic())
        for generation in set(self._generations.values()):
            generation.fail(EngineDead(fault))
        self._generations.clear()

    async def close(self) -> None:
        """End the core; whoever still waits gets `EngineDead`."""
        await asyncio.to_thread(self.client.close)

    def _listen(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop was closed before the engine
            while True:
                try:
                    outputs = self.client.recv()
                except EngineDead as error:
                    self._loop.call_soon_threadsafe(self.fail, str(error))
                    return
                self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        try:
            processed = self._output_processor.process(outputs, time.monotonic())
        except Exception as error:  # our bug: better an end with a reason than callers who hang
            logger.exception("the front end cannot process what the core sent")
            self.fail(f"{type(error).__name__}: {error}")
            return
        self._abort_in_core(processed.abort_ids)
        for output in processed.request_outputs:
            generation = self._generations[output.request_id]
            if output.finished:
                del self._generations[output.request_id]
            generation.put(output)

    def _abort(self, request_ids: Sequence[str]) -> None:
        """The caller of these requests went away."""
        for request_id in request_ids:
            if self._generations.pop(request_id, None) is not None:
                processed = self._output_processor.abort(request_id, time.monotonic())
                self._abort_in_core(processed.abort_ids)

    def _abort_in_core(self, engine_request_ids: Sequence[str]) -> None:
        if engine_request_ids:
            with contextlib.suppress(EngineDead):  # `_listen` hears of it too
                self.client.abort(engine_request_ids)
