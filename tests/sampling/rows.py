"""Builds LogitsRows and RequestStates around given requests, as a step would."""

import numpy as np

from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.sampling_params import SamplingParams
from nano.step import NewRequest, StepPlan


def make_rows(
    requests: list[tuple[SamplingParams, list[int], list[int]]],
    *,
    eos_token_ids: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> tuple[LogitsRows, RequestStates]:
    """One logits row per (params, prompt, output); it samples the token after the output."""
    longest = max(len(prompt) + len(output) for _, prompt, output in requests)
    states = RequestStates(len(requests), longest + 8, block_size=16)
    plan = StepPlan(step=0)
    for i, (params, prompt, output) in enumerate(requests):
        plan.new_requests.append(
            NewRequest(
                request_id=str(i),
                token_ids=prompt + output,
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                block_ids=[],
                sampling_params=params,
                eos_token_ids=eos_token_ids,
                bad_words_token_ids=bad_words,
            )
        )
    states.apply(plan)
    row = np.array([states.row_of[str(i)] for i in range(len(requests))])
    rows = LogitsRows(row, states.num_tokens[row].astype(np.int64))
    return rows, states
