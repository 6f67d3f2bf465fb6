"""Building one step's tensors: what the worker does on the host before the model runs."""

import pytest

from nano.device import CpuDevice
from nano.model_input.input_batch import InputBatchBuilder
from nano.model_input.request_states import RequestStates
from nano.sampling_params import SamplingParams
from nano.step import NewRequest, StepPlan

BLOCK_SIZE = 16
PROMPT = 512


def decode_plan(states: RequestStates, num_requests: int, num_drafts: int) -> StepPlan:
    """`num_requests` requests at 512 tokens, each with one token and its drafts to compute."""
    admit = StepPlan(step=0)
    params = SamplingParams(seed=0)
    blocks = -(-(PROMPT + num_drafts) // BLOCK_SIZE)
    for i in range(num_requests):
        block_ids = list(range(i * blocks, (i + 1) * blocks))
        admit.new_requests.append(
            NewRequest(f"r{i}", list(range(PROMPT)), PROMPT, PROMPT - 1, block_ids, params)
        )
    states.apply(admit)
    names = [f"r{i}" for i in range(num_requests)]
    return StepPlan(
        step=1,
        num_scheduled_tokens=dict.fromkeys(names, 1 + num_drafts),
        num_computed_tokens=dict.fromkeys(names, PROMPT - 1),
        draft_token_ids={name: list(range(num_drafts)) for name in names} if num_drafts else {},
    )


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("num_requests", [1, 64, 256])
def test_apply_and_build_a_step(benchmark, num_requests: int, num_drafts: int):
    states = RequestStates(256, 1024, BLOCK_SIZE)
    builder = InputBatchBuilder(states, CpuDevice(), BLOCK_SIZE, 8192)
    plan = decode_plan(states, num_requests, num_drafts)

    def step():
        states.apply(plan)
        return builder.build(plan)

    batch = benchmark(step)
    assert len(batch.input_ids) == num_requests * (1 + num_drafts)


def test_build_one_long_prompt(benchmark):
    states = RequestStates(1, 8192, BLOCK_SIZE)
    builder = InputBatchBuilder(states, CpuDevice(), BLOCK_SIZE, 8192)
    block_ids = list(range(8000 // BLOCK_SIZE))
    request = NewRequest("r", [7] * 8000, 8000, 0, block_ids, SamplingParams(seed=0))
    states.apply(StepPlan(step=0, new_requests=[request]))
    plan = StepPlan(step=1, num_scheduled_tokens={"r": 8000}, num_computed_tokens={"r": 0})
    assert len(benchmark(builder.build, plan).input_ids) == 8000
