"""OutputProcessor: token news from the core to RequestOutputs. Torch-free.

Owns the front end's half of every request in flight: its text so far, its stop strings, its log
probabilities, and the choices of n > 1. Works token by token, so a request's output is the same
however many tokens a step brings: whatever follows the token that completes a stop string is
dropped as if it had never been computed. No clock and no I/O here, so `LLM` and an asyncio server
use it alike.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from enum import Enum

from nano.engine.detokenizer import IncrementalDetokenizer
from nano.engine.input_processor import PreparedRequest
from nano.engine.stop_strings import StopChecker, StopMatch
from nano.engine.timeline import RequestObserver, Timeline
from nano.engine.tokenizer import Tokenizer
from nano.errors import InvalidRequest
from nano.outputs import (
    LATE,
    CompletionOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SpeculationTrace,
    TokenOutput,
)
from nano.speculation import DraftRecord, SpeculationStats
from nano.step import TokenLogprobs


class OutputKind(Enum):
    """What a request's RequestOutputs hold."""

    FINAL = "final"  # one output, when every completion has finished
    CUMULATIVE = "cumulative"  # at each step all completions, whole so far
    DELTA = "delta"  # at each step the completions with news, and only the news


class OutputProcessor:
    """Every request in flight, from `register` to the one output that is `finished`.

    Each registered request gets exactly one finished output: from `process`, `abort` or
    `fail_all`. News of an id that is unknown or has finished is dropped; it is what the core sent
    before it heard of the abort. `now` is time.monotonic() seconds. Not for several threads.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.observers: list[RequestObserver] = []  # told of every completion
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._completions: dict[str, tuple[_Request, _Completion]] = {}  # by child id, unfinished
        self._abort_ids: list[str] = []

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def register(self, prepared: PreparedRequest, kind: OutputKind = OutputKind.FINAL) -> None:
        """Expect news of `prepared.children`. Call before they are sent to the core.

        Raises `InvalidRequest` if one of the ids is in flight already.
        """
        child_ids = [child.request_id for child in prepared.children]
        for taken in (self._requests.keys() & {prepared.request_id}) | (
            self._completions.keys() & set(child_ids)
        ):
            raise InvalidRequest(f"request_id {taken!r} is in use", "request_id")
        request = _Request(prepared, kind, self._tokenizer)
        self._requests[prepared.request_id] = request
        for child_id, completion in zip(child_ids, request.completions):
            self._completions[child_id] = (request, completion)
            for observer in self.observers:
                observer.entered(completion.timeline)

    def process(self, outputs: Sequence[TokenOutput], now: float) -> Iterator[RequestOutput]:
        """Take the news of some steps. What each request's caller is to see comes as soon as that
        request's news are taken, before those of the next.
        """
        by_request: dict[_Request, list[tuple[_Completion, TokenOutput]]] = {}
        for output in outputs:
            known = self._completions.get(output.request_id)
            if known is not None:
                request, completion = known
                by_request.setdefault(request, []).append((completion, output))
        for request, news in by_request.items():
            if request.is_finished:  # aborted since
                continue
            for completion, output in news:
                if completion.finish_reason is None:
                    self._take(request, completion, output, now)
            seen = self._emit(request, now)
            if seen is not None:
                yield seen

    def take_abort_ids(self) -> list[str]:
        """What the core computes for nobody, since the last call: engine request ids."""
        abort_ids, self._abort_ids = self._abort_ids, []
        return abort_ids

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """End a request because its caller went away; unknown ids are fine."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._abort_ids += self._end(request, FinishReason.ABORT, None, now)
        return self._emit(request, now)

    def fail_all(self, error: str, now: float) -> list[RequestOutput]:
        """End every request with `error`: the core is dead."""
        failed = []
        for request in list(self._requests.values()):
            self._end(request, FinishReason.ERROR, error, now)
            failed.append(self._emit(request, now))
        return [output for output in failed if output is not None]

    def _take(
        self, request: "_Request", completion: "_Completion", output: TokenOutput, now: float
    ) -> None:
        num_tokens = completion.take(output)
        request.note(completion, output, now)
        if self.observers:
            completion.timeline.note(output, num_tokens, now, self.observers)
        if completion.finish_reason is None:
            return
        del self._completions[output.request_id]
        self._ended(completion, now)
        if output.finish_reason is None:  # a stop string ends it, of which the core knows nothing
            self._abort_ids.append(output.request_id)
        elif output.finish_reason in LATE:
            # The caller will be told that all of it is too late: the rest has no purpose.
            self._abort_ids += self._end(request, output.finish_reason, None, now)

    def _end(
        self, request: "_Request", reason: FinishReason, error: str | None, now: float
    ) -> list[str]:
        """Finish the completions still open; returns their engine request ids."""
        open_ids = [child_id for child_id in request.child_ids if child_id in self._completions]
        for child_id in open_ids:
            _, completion = self._completions.pop(child_id)
            completion.finish(reason, error=error)
            self._ended(completion, now)
        return open_ids

    def _ended(self, completion: "_Completion", now: float) -> None:
        timeline = completion.timeline
        timeline.finished_time, timeline.finish_reason = now, completion.finish_reason
        for observer in self.observers:
            observer.ended(timeline)

    def _emit(self, request: "_Request", now: float) -> RequestOutput | None:
        if request.is_finished:
            del self._requests[request.request_id]
        return request.output(now)


class _Request:
    """A caller's request: its completions, and what belongs to the prompt they share."""

    def __init__(self, prepared: PreparedRequest, kind: OutputKind, tokenizer: Tokenizer):
        self.request_id = prepared.request_id
        self.child_ids = [child.request_id for child in prepared.children]
        self.completions = [
            _Completion(index, prepared, tokenizer, keeps_all=kind is not OutputKind.DELTA)
            for index in range(len(prepared.children))
        ]
        self._prompt = prepared.prompt
        self._prompt_token_ids = prepared.prompt_token_ids
        self._kind = kind
        self._tokenizer = tokenizer
        self._metrics = RequestMetrics(arrival_time=prepared.arrival_time)
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if prepared.sampling_params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    @property
    def is_finished(self) -> bool:
        return None not in [completion.finish_reason for completion in self.completions]

    def note(self, completion: "_Completion", output: TokenOutput, now: float) -> None:
        """Record what `output` says of the prompt and of the clock."""
        metrics = self._metrics
        if output.first_scheduled_time is not None and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
        if output.new_token_ids and metrics.first_token_time is None:
            metrics.first_token_time = now
        if completion.index == 0:
            if output.num_cached_tokens is not None:
                self._num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None and self._prompt_logprobs is not None:
                self._prompt_logprobs += _position_logprobs(output.prompt_logprobs, self._tokenizer)

    def output(self, now: float) -> RequestOutput | None:
        """What the caller is to see now, by the request's kind."""
        finished = self.is_finished
        if finished:
            self._metrics.finished_time = now
        with_news = [completion for completion in self.completions if completion.has_news]
        if not finished and (self._kind is OutputKind.FINAL or not with_news):
            return None
        completions = with_news if self._kind is OutputKind.DELTA else self.completions
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion.output() for completion in completions],
            finished=finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics,
        )


class _Completion:
    """One completion: its tokens, text, log probabilities, drafts and end.

    With `keeps_all` everything is kept until the end; without, `output` hands out what came since
    the last call and forgets it.
    """

    def __init__(
        self, index: int, prepared: PreparedRequest, tokenizer: Tokenizer, keeps_all: bool
    ):
        child = prepared.children[index]
        params = child.sampling_params
        self.index = index
        self.timeline = Timeline(
            num_prompt_tokens=len(child.prompt_token_ids),
            max_tokens=params.max_tokens,
            arrival_time=child.arrival_time,
        )
        self.finish_reason: FinishReason | None = None
        self.has_news = False
        self._keeps_all = keeps_all
        self._stream_interval = prepared.stream_interval
        self._news_size = 1  # tokens that are worth an output; the first one is
        self._tokenizer = tokenizer
        self._seed = params.seed
        self._min_tokens = params.min_tokens
        self._shows_stop = params.include_stop_str_in_output
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, child.prompt_token_ids, params.skip_special_tokens
        )
        self._stop_checker = StopChecker(params.stop, self._shows_stop) if params.stop else None
        self._num_tokens = 0  # whose text was looked at
        self._token_ids: list[int] = []
        self._text: list[str] = []  # pieces: joined when looked at
        self._logprobs: list[PositionLogprobs] | None = None
        self._cumulative_logprob: float | None = None
        if params.logprobs is not None:
            self._logprobs, self._cumulative_logprob = [], 0.0
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._counts_drafts = child.traces_drafts  # or else the core's last output has the counts
        self._report = prepared.speculative
        if self._report is not None:
            self._report = dataclasses.replace(self._report, stats=SpeculationStats())
        self._trace = SpeculationTrace() if prepared.shows_trace else None

    def take(self, output: TokenOutput) -> int:
        """Add the new tokens, up to the one that completes a stop string; perhaps finish.

        Returns how many were added.
        """
        token_ids = output.new_token_ids
        ends_in_stop_token = output.finish_reason is FinishReason.STOP
        num_visible = len(token_ids) - (1 if ends_in_stop_token and not self._shows_stop else 0)
        num_before, num_taken, match = self._num_tokens, len(token_ids), None
        for position in range(num_visible):
            match = self._add_text(token_ids[position])
            if match is not None:
                num_taken = position + 1
                break
        self._token_ids += token_ids[:num_taken]
        if token_ids and len(self._token_ids) >= self._news_size:
            self.has_news = True
        if self._logprobs is not None and output.logprobs is not None:
            self._add_logprobs(output.logprobs, num_taken)
        if num_taken:
            self._add_draft(output.draft, num_before, num_taken)
        if self._report is not None and output.speculation is not None and not self._counts_drafts:
            self._report.stats = output.speculation
        if match is not None:
            self.finish(FinishReason.STOP, stop_reason=match.stop)
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_token_id, output.error)
        return num_taken

    def _add_text(self, token_id: int) -> StopMatch | None:
        self._num_tokens += 1
        text = self._detokenizer.step(token_id)
        if self._stop_checker is not None:
            checked = self._stop_checker.feed(text, self._num_tokens >= self._min_tokens)
            if isinstance(checked, StopMatch):
                self._text.append(checked.text)
                return checked
            text = checked
        if text:
            self._text.append(text)
        return None

    def _add_logprobs(self, new: TokenLogprobs, count: int) -> None:
        assert self._logprobs is not None
        assert self._cumulative_logprob is not None
        self._logprobs += _position_logprobs(new, self._tokenizer, count)
        self._cumulative_logprob += sum(entry[0] for entry in new.logprobs[:count])

    def _add_draft(self, record: DraftRecord | None, position: int, count: int) -> None:
        if self._report is not None:
            self._report.count(count, record)
        if self._trace is not None:
            assert record is not None, "the core traces every step that samples"
            self._trace.add(count, position, record)

    def finish(
        self,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End here. Text held back is shown, unless a stop string was found in it."""
        assert self.finish_reason is None
        self.finish_reason = reason
        self._stop_reason = stop_reason
        self._error = error
        self.has_news = True
        if not isinstance(stop_reason, str):
            if self._stop_checker is not None:
                self._text.append(self._stop_checker.flush())
            self._text.append(self._detokenizer.flush())

    def output(self) -> CompletionOutput:
        """The completion so far, or what is new of it."""
        output = CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=list(self._token_ids),
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            seed=self._seed,
            error=self._error,
            speculative=None if self.finish_reason is None else self._report,
            speculative_trace=copy.deepcopy(self._trace),
        )
        self.has_news = False
        if self._keeps_all:
            self._text = [output.text]
        else:
            self._news_size = self._stream_interval
            self._text, self._token_ids = [], []
            self._logprobs = None if self._logprobs is None else []
            self._trace = None if self._trace is None else SpeculationTrace()
        return output


def _position_logprobs(
    entries: TokenLogprobs, tokenizer: Tokenizer, count: int | None = None
) -> list[PositionLogprobs]:
    """One dict per token: the token itself first, then the alternatives by rank."""
    positions: list[PositionLogprobs] = []
    for ids, logprobs, rank in zip(
        entries.token_ids[:count], entries.logprobs[:count], entries.ranks[:count]
    ):
        position = {ids[0]: Logprob(logprobs[0], rank, tokenizer.token_text(ids[0]))}
        for rank_above, (token_id, logprob) in enumerate(zip(ids[1:], logprobs[1:]), start=1):
            if token_id != ids[0]:
                position[token_id] = Logprob(logprob, rank_above, tokenizer.token_text(token_id))
        positions.append(position)
    return positions
