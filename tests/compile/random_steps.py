"""RandomSteps: plans of requests that come, read prompts in chunks, decode, verify drafts, end."""

import random
from dataclasses import dataclass

from nano.sampling_params import SamplingParams
from nano.step import NewRequest, StepOutput, StepPlan


@dataclass(slots=True)
class _Request:
    token_ids: list[int]  # known
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int]
    drafts: list[int]  # the true continuation, as far as it was foretold


class RandomSteps:
    """A scheduler without aims. `plan` a step, run it anywhere, and `update` with what came of it.

    Requests of equal index have equal prompts in every instance. With the token ids that another
    instance has found for them as `foretold`, most drafts are right.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_requests: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        foretold: dict[str, list[int]] | None = None,
    ):
        self._random = random.Random(seed)
        self._max_model_len = max_model_len
        self._blocks_each = -(-max_model_len // block_size)
        self._vocab_size = vocab_size
        self._foretold = foretold or {}
        self._free_rows = list(range(num_requests))
        self._requests: dict[str, _Request] = {}
        self._num_made = self._num_steps = 0
        self.token_ids: dict[str, list[int]] = {}  # found, prompts apart

    def plan(self, max_num_tokens: int, num_drafts: int | None = None) -> StepPlan:
        """None: any mix. With a number, that many drafts for each, and nobody comes while others
        are there: most steps are uniform."""
        finished = [
            request_id
            for request_id, request in self._requests.items()
            if len(request.token_ids) > self._max_model_len - 8
        ]
        for request_id in finished:
            ended = self._requests.pop(request_id)
            self._free_rows.append(ended.block_ids[0] // self._blocks_each)
        plan = StepPlan(self._num_steps, finished_request_ids=finished)
        self._num_steps += 1
        new: list[str] = []
        chance = 0.5 if num_drafts is None else 0.0
        while self._free_rows and (self._random.random() < chance or not self._requests):
            new.append(self._admit())
        for request_id in self._random.sample(sorted(self._requests), len(self._requests)):
            request = self._requests[request_id]
            num_pending = len(request.token_ids) - request.num_computed
            left = max_num_tokens - plan.num_tokens
            is_left_out = self._random.random() < 0.1 and plan.num_scheduled_tokens
            if not left or (is_left_out and request_id not in new):
                if request_id in new:
                    self._withdraw(request_id, new)
                continue
            count = num_pending
            if num_pending > 1:
                count = self._random.randint(1, min(num_pending, left))
            elif (drafts := self._drafts(request_id, num_drafts)) and len(drafts) < left:
                plan.draft_token_ids[request_id] = drafts
                count += len(drafts)
            plan.num_scheduled_tokens[request_id] = count
            plan.num_computed_tokens[request_id] = request.num_computed
        plan.new_requests = [self._as_new(request_id) for request_id in new]
        return plan

    def update(self, plan: StepPlan, output: StepOutput) -> None:
        assert not output.errors
        for request_id, token_ids in zip(output.request_ids, output.token_ids):
            request = self._requests[request_id]
            request.num_computed += plan.num_scheduled_tokens[request_id]
            if token_ids:
                request.token_ids += token_ids
                request.num_computed = len(request.token_ids) - 1
                self.token_ids.setdefault(request_id, []).extend(token_ids)

    def _admit(self) -> str:
        request_id = str(self._num_made)
        generator = random.Random(self._num_made)
        self._num_made += 1
        length = generator.randint(1, self._max_model_len // 2)
        row = self._free_rows.pop(0)
        self._requests[request_id] = _Request(
            token_ids=[generator.randrange(self._vocab_size) for _ in range(length)],
            num_prompt_tokens=length,
            num_computed=0,
            block_ids=list(range(row * self._blocks_each, (row + 1) * self._blocks_each)),
            drafts=self._foretold.get(request_id, []),
        )
        return request_id

    def _withdraw(self, request_id: str, new: list[str]) -> None:
        """A request that found no room in the step comes again later, under another number."""
        row = self._requests.pop(request_id).block_ids[0] // self._blocks_each
        self._free_rows.append(row)
        new.remove(request_id)

    def _drafts(self, request_id: str, count: int | None) -> list[int]:
        request = self._requests[request_id]
        count = self._random.choice((0, 0, 1, 2, 5)) if count is None else count
        start = len(request.token_ids) - request.num_prompt_tokens
        drafts = request.drafts[start : start + count]
        drafts += [0] * (count - len(drafts))
        if drafts and self._random.random() < 0.5:  # and often one is wrong
            drafts[self._random.randrange(count)] = self._random.randrange(self._vocab_size)
        return drafts

    def _as_new(self, request_id: str) -> NewRequest:
        request = self._requests[request_id]
        return NewRequest(
            request_id=request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=0,
            block_ids=request.block_ids,
            sampling_params=SamplingParams(
                temperature=0.8 * (int(request_id) % 2), seed=int(request_id), logprobs=2
            ),
        )
