"""LLM: the library's front end. vLLM's names and shapes, and a streaming `generate`."""

import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, overload

from tqdm.auto import tqdm

from nano.checkpoint.hf_config import load_decoder_config
from nano.config import EngineConfig
from nano.engine.client import EngineClient, InProcessClient
from nano.engine.core import build_core
from nano.engine.input_processor import InputProcessor, PreparedRequest
from nano.engine.output_processor import OutputKind, OutputProcessor
from nano.engine.tokenizer import Tokenizer
from nano.errors import EngineDead
from nano.log import ensure_logging
from nano.outputs import RequestOutput
from nano.prompts import (
    Message,
    Prediction,
    Prompt,
    Speculative,
    as_conversations,
    as_prompts,
    per_prompt,
    predictions_per_prompt,
    unpack,
    with_text_content,
)
from nano.resolve import resolve
from nano.sampling_params import SamplingParams

_RECV_SECONDS = 0.2  # longest wait for an engine process before Ctrl-C is heard


class LLM:
    """A model loaded in this process, ready to continue prompts.

        llm = LLM("demo")
        for output in llm.generate(["One, two,"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

    Keyword arguments are the engine arguments of `nano.config.ENGINE_ARGS` under vLLM's names
    (`max_model_len`, `max_num_seqs`, `block_size` ...); unknown ones are refused. With
    `use_subprocess` the engine core runs in a process of its own, as it does under the server.
    Use as a context manager, or call `close`, to free the model. Not thread-safe.

    In this process, torch itself is left with one thread where our kernels compute (see
    nano.native.threads): code beside it that needs torch's threads wants `use_subprocess`.
    """

    def __init__(
        self, model: str | Path = "demo", *, use_subprocess: bool = False, **engine_args: Any
    ) -> None:
        """Raises `ConfigError` or `CheckpointError` (both `ValueError`)."""
        ensure_logging()
        config = resolve(EngineConfig.from_args({"model": str(model), **engine_args}))
        folder = Path(config.model.path)
        self.tokenizer = Tokenizer.from_folder(Path(config.model.tokenizer or folder))
        self._client = _make_client(config, use_subprocess)
        self._inputs = InputProcessor(
            config,
            load_decoder_config(folder),
            self.tokenizer,
            num_kv_slots=self._client.ready.num_kv_slots,
            proposers=self._client.ready.proposers,
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._counter = itertools.count()
        self._mailboxes: dict[str, deque[RequestOutput]] = {}  # of open streams, by request id

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        speculative: Speculative | Sequence[Speculative | None] | None = None,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        speculative_trace: bool = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        speculative: Speculative | Sequence[Speculative | None] | None = None,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        speculative_trace: bool = False,
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        speculative: Speculative | Sequence[Speculative | None] | None = None,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        speculative_trace: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Continue one prompt or many.

        `sampling_params` is one for all, one per prompt, or None for the model's own defaults.
        Returns one output per prompt, in order. With `stream` it is an iterator of increments: each
        RequestOutput holds only the new text, tokens and logprobs of the completions that have
        any; leaving it early aborts what is unfinished. Raises `InvalidRequest` before anything
        is queued if any prompt or parameter is bad; a request that fails later has
        finish_reason "error" in its own output.

        What follows changes the time an answer takes, never the answer. `speculative` is
        {"method" or "methods", "num_tokens", "enabled"}, `prediction` what you think will come, a
        text or token ids; each is one for all prompts or a list with one, or None, per prompt.
        A finished completion's `speculative` says what was in force and what came of it; with
        `speculative_trace`, its `speculative_trace` says where each token came from.
        """
        requests = self._prepare(
            as_prompts(prompts),
            sampling_params,
            priority,
            speculative,
            prediction,
            speculative_trace=speculative_trace,
            add_special_tokens=True,
        )
        return self._run(requests, stream, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        speculative: Speculative | Sequence[Speculative | None] | None = None,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        speculative_trace: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer one conversation or many, rendered by the model's chat template.

        `messages` are OpenAI's: [{"role": "user", "content": "..."}]. The rest as `generate`.
        """
        texts = [
            self.tokenizer.apply_chat_template(
                with_text_content(conversation),
                add_generation_prompt=add_generation_prompt,
                template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in as_conversations(messages)
        ]
        # The template writes BOS itself where the model wants one.
        requests = self._prepare(
            texts,
            sampling_params,
            None,
            speculative,
            prediction,
            speculative_trace=speculative_trace,
            add_special_tokens=False,
        )
        return self._run(requests, stream, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without sampling parameters gets: generation_config.json's values."""
        return self._inputs.default_sampling_params()

    @property
    def fingerprint(self) -> str:
        """Names how this engine computes: equal fingerprint and seed, equal tokens."""
        return self._client.ready.numerics_id

    @property
    def is_exact(self) -> bool:
        """Whether no bit of an answer depends on what else is computed, and how."""
        return self._client.ready.is_exact

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while requests run."""
        return bool(self._client.control("reset_prefix_cache")["is_reset"])

    def stats(self) -> dict[str, float]:
        """Counts of the engine core, now and since the start (see `EngineCore.control`)."""
        return self._client.control("stats")

    def close(self) -> None:
        """Free the model, or end the engine's process. The LLM is of no use afterwards."""
        self._client.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        speculative: Speculative | Sequence[Speculative | None] | None,
        prediction: Prediction | Sequence[Prediction | None] | None,
        *,
        speculative_trace: bool,
        add_special_tokens: bool,
    ) -> list[PreparedRequest]:
        """Check and tokenise everything; nothing is queued yet."""
        count = len(prompts)
        rows = zip(
            prompts,
            per_prompt("sampling_params", sampling_params, count),
            per_prompt("priority", priority, count),
            per_prompt("speculative", speculative, count),
            predictions_per_prompt(prediction, count),
        )
        prepared = []
        for prompt, params_, priority_, speculative_, prediction_ in rows:
            content, cache_salt = unpack(prompt)
            prepared.append(
                self._inputs.process(
                    f"request-{next(self._counter)}",
                    content,
                    params_,
                    arrival_time=time.monotonic(),
                    priority=priority_ or 0,
                    cache_salt=cache_salt,
                    add_special_tokens=add_special_tokens,
                    speculative=speculative_,
                    prediction=prediction_,
                    speculative_trace=speculative_trace,
                )
            )
        return prepared

    def _run(
        self, requests: list[PreparedRequest], stream: bool, use_tqdm: bool
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        if stream:
            return self._stream(requests, OutputKind.DELTA)
        order = {request.request_id: i for i, request in enumerate(requests)}
        outputs = []
        progress = tqdm(
            total=len(requests), desc="Requests", unit="req", disable=not (use_tqdm and requests)
        )
        num_tokens, started = 0, time.perf_counter()
        with progress:
            for output in self._stream(requests, OutputKind.FINAL):
                outputs.append(output)
                num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                rate = num_tokens / (time.perf_counter() - started)
                progress.set_postfix_str(f"{rate:.1f} output tok/s", refresh=False)
                progress.update()
        return sorted(outputs, key=lambda output: order[output.request_id])

    def _stream(self, requests: list[PreparedRequest], kind: OutputKind) -> Iterator[RequestOutput]:
        """Queue `requests` and step the engine until all have finished.

        Several streams may be open at once: whoever steps the engine leaves the others' outputs
        in their mailboxes.
        """
        mailbox: deque[RequestOutput] = deque()
        unfinished = {request.request_id for request in requests}
        try:
            for request in requests:
                self._outputs.register(request, kind)
                self._mailboxes[request.request_id] = mailbox
            with _interrupts_held():
                self._client.add([child for request in requests for child in request.children])
            while unfinished:
                while not mailbox:
                    self._step()
                output = mailbox.popleft()
                if output.finished:
                    unfinished.discard(output.request_id)
                yield output
        finally:
            with _interrupts_held():
                for request_id in unfinished:  # an error, Ctrl-C, or a stream that was left early
                    self._outputs.abort(request_id, time.monotonic())
                for request in requests:
                    self._mailboxes.pop(request.request_id, None)
                with suppress(EngineDead):  # which has been said, and nothing is left to end
                    self._client.abort(self._outputs.take_abort_ids())

    def _step(self) -> None:
        """Take the engine's news, if any, and deliver it."""
        with _interrupts_held():
            news = self._client.recv(_RECV_SECONDS)
            for output in self._outputs.process(news, time.monotonic()):
                self._mailboxes[output.request_id].append(output)
            if abort_ids := self._outputs.take_abort_ids():
                self._client.abort(abort_ids)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block.

    Half a step would leave the engine in no state at all, and news that is taken but not
    delivered would be missed by other streams.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield  # Python raises KeyboardInterrupt in the main thread only
        return
    held: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        held.append(signum)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _make_client(config: EngineConfig, use_subprocess: bool) -> EngineClient:
    if not use_subprocess:
        return InProcessClient(build_core(config))
    # Needs pyzmq and msgspec, which the plain library does not.
    from nano.engine.subprocess_client import SubprocessClient

    return SubprocessClient(config)
