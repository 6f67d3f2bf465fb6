"""MadeUpRequests: requests nobody made, and for their steps the plans a scheduler would make."""

from dataclasses import dataclass, field

from nano.errors import ConfigError
from nano.sampling_params import SamplingParams
from nano.step import DRAFT_ON_DEVICE, DraftRequest, NewRequest, StepOutput, StepPlan
from nano.worker.worker import WorkerInfo

PROMPT = 12  # tokens
CHUNK = 24  # tokens of a longer prompt, in a step with others
_NUM_STEPS = 8  # that any request lives to see


@dataclass(slots=True)
class _Request:
    num_known: int  # tokens, of which the newest is not computed
    drafts: list[int] = field(default_factory=list)  # made by the worker for the next step


class MadeUpRequests:
    """Plans step after step. All requests verify as many drafts, so that steps are uniform."""

    def __init__(self, info: WorkerInfo, num_requests: int, num_drafts: int, max_model_len: int):
        """Raises `ConfigError` where the engine has no room for them."""
        self._info = info
        self._num_drafts = num_drafts
        self._requests: dict[str, _Request] = {}
        self._num_admitted = self._num_steps = 0
        needed = self.sizes(num_requests, num_drafts, info.kv_cache.block_size)
        self._max_num_tokens = needed["max_model_len"]
        self._num_blocks = needed["num_gpu_blocks_override"] // needed["max_num_seqs"]
        self._free_blocks = list(range(info.kv_cache.num_blocks))
        for name, value in (
            ("max_model_len", max_model_len),
            ("max_num_seqs", info.max_num_requests),
            ("num_gpu_blocks_override", info.kv_cache.num_blocks),
            ("max_num_batched_tokens", info.token_budget),
        ):
            if value < needed[name]:
                raise ConfigError(f"{name} must be at least {needed[name]} here, got {value}")
        # A model's guesses are asked for where there is one; all of a step come from it.
        models = [proposer.name for proposer in info.proposers if not proposer.is_free]
        texts = [proposer.name for proposer in info.proposers if not proposer.needs_prediction]
        self._asked = (models or texts)[:1]

    @staticmethod
    def sizes(num_requests: int, num_drafts: int, block_size: int) -> dict[str, int]:
        """The least that all steps need, by engine argument."""
        max_model_len = PROMPT + CHUNK + _NUM_STEPS * (num_drafts + 1)
        largest = max(num_requests * (num_drafts + 1), num_requests + num_drafts + CHUNK)
        return {
            "max_model_len": max_model_len,
            "max_num_seqs": num_requests + 1,  # one comes later
            "max_num_batched_tokens": largest,
            "num_gpu_blocks_override": (num_requests + 1) * -(-max_model_len // block_size),
        }

    def admit(self, num_tokens: int = PROMPT) -> StepPlan:
        """A step with the prompt of a new request and nothing else."""
        plan = self._plan()
        self._add(plan, num_tokens, PROMPT)
        return plan

    def decode(self) -> StepPlan:
        """One token of every request."""
        return self._continue(0)

    def verify(self) -> StepPlan:
        """One token and all drafts of every request."""
        return self._continue(len(self._requests))

    def mix(self) -> StepPlan:
        """The drafts of one request, one token of the others, a part of a new one's prompt."""
        plan = self._continue(1)
        self._add(plan, CHUNK, CHUNK + PROMPT)
        return plan

    def update(self, plan: StepPlan, output: StepOutput) -> None:
        """What came of a plan."""
        assert not output.errors, output.errors
        for request_id, tokens, drafts in zip(
            output.request_ids, output.token_ids, output.draft_token_ids
        ):
            self._requests[request_id].num_known += len(tokens)
            self._requests[request_id].drafts = drafts

    def _plan(self) -> StepPlan:
        self._num_steps += 1
        return StepPlan(step=self._num_steps)

    def _continue(self, num_verifying: int) -> StepPlan:
        plan = self._plan()
        for i, (request_id, request) in enumerate(self._requests.items()):
            drafts = self._drafts(request) if i < num_verifying else []
            plan.num_scheduled_tokens[request_id] = 1 + len(drafts)
            plan.num_computed_tokens[request_id] = request.num_known - 1
            if drafts:
                plan.draft_token_ids[request_id] = drafts
            if self._num_drafts:
                plan.draft_requests[request_id] = tuple(
                    DraftRequest(name, self._num_drafts) for name in self._asked
                )
        return plan

    def _drafts(self, request: _Request) -> list[int]:
        """As many as there are to be: the worker's, and token 0 for those it did not find."""
        if DRAFT_ON_DEVICE in request.drafts:
            return [DRAFT_ON_DEVICE] * self._num_drafts
        return (request.drafts + [0] * self._num_drafts)[: self._num_drafts]

    def _add(self, plan: StepPlan, num_tokens: int, num_prompt_tokens: int) -> None:
        i = self._num_admitted
        self._num_admitted += 1
        request_id = f"request-{i}"
        self._requests[request_id] = _Request(num_prompt_tokens)
        plan.num_scheduled_tokens[request_id] = num_tokens
        plan.new_requests.append(
            NewRequest(
                request_id=request_id,
                token_ids=[(i + j) % 100 for j in range(num_prompt_tokens)],
                num_prompt_tokens=num_prompt_tokens,
                num_computed_tokens=0,
                block_ids=[self._free_blocks.pop() for _ in range(self._num_blocks)],
                sampling_params=SamplingParams(
                    temperature=0.8 * (i % 2), seed=i, max_tokens=self._max_num_tokens
                ),
                proposers=tuple(proposer.name for proposer in self._info.proposers),
            )
        )
