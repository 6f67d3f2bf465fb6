"""StepProbe: made-up steps of the real model on a KV cache of their own.

To time them, before there are requests, and to compare two ways of computing the model.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from nano.compile.artifact import ForwardFn
from nano.device import Device
from nano.sampling_params import SamplingParams
from nano.step import NewRequest, StepPlan
from nano.worker.model_runner import ModelRunner

# (KV blocks, requests, tokens a step) -> a runner of the model with memory of its own.
MakeRunner = Callable[[int, int, int], ModelRunner]

_CONTEXT = 40  # tokens that the compared steps attend to


class StepProbe:
    """Runs a request nobody made. Each call allocates what it needs and lets go of it."""

    def __init__(
        self,
        make_runner: MakeRunner,
        device: Device,
        *,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
    ):
        self._make_runner = make_runner
        self._device = device
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def hidden(self, forward: ForwardFn, num_tokens: int) -> Tensor:
        """What `forward` makes of a chunk of `num_tokens`, or fewer if no more fit: [T, hidden].

        All but one are drafts to verify, or nobody would ask for their hidden states.
        """
        num_tokens = min(num_tokens, self._max_model_len)
        num_computed = min(_CONTEXT, self._max_model_len - num_tokens)
        runner = self._runner(num_computed, num_tokens)
        runner.model_forward = forward
        runner.forward(self._plan(0, num_computed, num_tokens, num_drafts=num_tokens - 1))
        return runner.hidden

    def seconds(
        self, num_computed: int, num_tokens: int, num_runs: int, num_drafts: int = 0
    ) -> float:
        """Of a whole step: a chunk of `num_tokens` behind `num_computed` others.

        The last `num_drafts` of the chunk are drafts to verify. The least of `num_runs`, of which
        the first warms up.
        """
        runner = self._runner(num_computed, num_tokens)
        seconds = []
        for step in range(num_runs):
            plan = self._plan(step, num_computed, num_tokens, num_drafts)
            started = time.perf_counter()
            runner.execute(plan)
            self._device.synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

    def _runner(self, num_computed: int, num_tokens: int) -> ModelRunner:
        runner = self._make_runner(self._num_blocks(num_computed + num_tokens), 1, num_tokens)
        for cache in runner.context.kv_caches:
            cache.zero_()  # what was never computed is read here
        return runner

    def _plan(self, step: int, num_computed: int, num_tokens: int, num_drafts: int = 0) -> StepPlan:
        num_known = num_computed + num_tokens - num_drafts
        request_id = f"probe-{step}"
        return StepPlan(
            step=step,
            num_scheduled_tokens={request_id: num_tokens},
            num_computed_tokens={request_id: num_computed},
            draft_token_ids={request_id: [0] * num_drafts} if num_drafts else {},
            new_requests=[
                NewRequest(
                    request_id=request_id,
                    token_ids=[i % self._vocab_size for i in range(num_known)],
                    num_prompt_tokens=num_known,
                    num_computed_tokens=num_computed,
                    block_ids=list(range(self._num_blocks(num_computed + num_tokens))),
                    sampling_params=SamplingParams(temperature=0.0, seed=0),
                )
            ],
            finished_request_ids=[f"probe-{step - 1}"] if step else [],
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
