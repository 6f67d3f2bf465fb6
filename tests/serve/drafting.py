"""A core that drafts, made of a fixed answer: whatever the prompt, it continues with ANSWER.

Two proposers guess in front of it: "echo" from the request's prediction, "fast" the answer itself
with every third character wrong. Drafts are verified as a real core does, so that what a front
end makes of its news can be followed by hand.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nano.engine.client import EngineClient, LiveRequests
from nano.engine.core import ControlMethod
from nano.engine.messages import EngineReady, EngineRequest
from nano.errors import EngineDead
from nano.outputs import FinishReason, TokenOutput
from nano.speculation import DraftRecord, ProposerInfo, SpeculationStats

ANSWER = b"The quick brown fox jumps over the lazy dog. " * 20
ECHO = ProposerInfo("echo", 8, is_free=True, needs_prediction=True)
FAST = ProposerInfo("fast", 5, is_free=True)


@dataclass
class _Live:
    """A request in the core. Completions of one prompt begin at different characters."""

    request: EngineRequest
    num_tokens: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def answer(self, begin: int, count: int) -> bytes:
        begin += self.request.sampling_params.seed or 0
        return ANSWER[begin : begin + count]


class DraftingClient(EngineClient):
    """Steps every live request once per `recv`; an abort ends one at once."""

    def __init__(self) -> None:
        self.ready = EngineReady(512, 64, 16, 256, "nano-fake", (ECHO, FAST))
        self.requests: list[EngineRequest] = []  # all that ever came
        self._live: dict[str, _Live] = {}
        self._ids = LiveRequests()
        self._news: deque[TokenOutput] = deque()
        self._wake = threading.Condition()
        self._num_steps = 0
        self._is_closed = False

    def add(self, requests: Sequence[EngineRequest]) -> None:
        with self._wake:
            self._ids.enter(requests)
            self.requests += requests
            self._live |= {request.request_id: _Live(request) for request in requests}
            self._wake.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._wake:
            for request_id in request_ids:
                if self._live.pop(request_id, None) is not None:
                    self._news.append(TokenOutput(request_id, [], FinishReason.ABORT))

    def recv(self, timeout: float | None = None) -> list[TokenOutput]:
        with self._wake:
            self._wake.wait_for(lambda: self._live or self._news or self._is_closed, timeout)
            if self._is_closed:
                raise EngineDead("closed")
            self._num_steps += 1
            outputs = [*self._news, *map(self._step, self._live.values())]
            self._news.clear()
            self._ids.leave(outputs)
            for output in outputs:
                if output.finish_reason is not None:
                    self._live.pop(output.request_id, None)
            return outputs

    def control(self, method: ControlMethod) -> dict[str, float]:
        return {}

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()

    def _step(self, live: _Live) -> TokenOutput:
        request, begin = live.request, live.num_tokens
        proposer, drafts = self._drafts(live) if begin else ("", b"")  # none at the prompt's end
        target = live.answer(begin, len(drafts) + 1)
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == target[num_accepted]:
            num_accepted += 1
        token_ids = list(target[: num_accepted + 1])
        assert request.sampling_params.max_tokens is not None
        kept = token_ids[: request.sampling_params.max_tokens - begin]
        live.num_tokens += len(kept)
        live.stats.count(proposer, len(drafts), num_accepted, len(kept))
        output = TokenOutput(request.request_id, kept)
        if request.traces_drafts:
            output.draft = DraftRecord(self._num_steps, proposer, list(drafts), token_ids)
        if live.num_tokens == request.sampling_params.max_tokens:
            output.finish_reason, output.speculation = FinishReason.LENGTH, live.stats
        return output

    def _drafts(self, live: _Live) -> tuple[str, bytes]:
        wishes, prediction = live.request.speculation, bytes(live.request.prediction_token_ids)
        names = (ECHO.name, FAST.name) if wishes.methods is None else wishes.methods
        for proposer in (ECHO, FAST):
            count = proposer.num_tokens if wishes.num_tokens is None else wishes.num_tokens
            count = min(count, proposer.num_tokens)
            begin = live.num_tokens
            if proposer is ECHO:
                guess = prediction[begin : begin + count]
            else:
                right = live.answer(begin, count)
                guess = bytes(b"#"[0] if i % 3 == 2 else c for i, c in enumerate(right))
            if wishes.enabled and proposer.name in names and guess:
                return proposer.name, guess
        return "", b""
