"""The step's tensors against the plan they were built from, and rows that never move."""

import numpy as np
import pytest
import torch

from nano.device import CpuDevice, HostTransfers
from nano.model_input.device_drafts import DeviceDrafts, DraftTable
from nano.model_input.input_batch import InputBatch, InputBatchBuilder
from nano.model_input.request_states import NO_LOGPROBS, RequestStates
from nano.sampling_params import SamplingParams
from nano.step import DRAFT_ON_DEVICE, NewRequest, StepPlan

BLOCK_SIZE = 4


def new(request_id: str, token_ids: list[int], num_prompt: int, computed: int, **params):
    num_blocks = -(-len(token_ids) // BLOCK_SIZE) + 1
    first = 100 * (ord(request_id) - ord("a"))
    return NewRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        num_computed_tokens=computed,
        block_ids=list(range(first, first + num_blocks)),
        sampling_params=SamplingParams(seed=0, **params),
    )


def plan_of(step: int, scheduled: dict[str, int], computed: dict[str, int], **rest) -> StepPlan:
    return StepPlan(step=step, num_scheduled_tokens=scheduled, num_computed_tokens=computed, **rest)


class Harness:
    def __init__(self) -> None:
        self.states = RequestStates(8, 64, BLOCK_SIZE)
        self.builder = InputBatchBuilder(self.states, CpuDevice(), BLOCK_SIZE, 64)

    def step(self, plan: StepPlan) -> InputBatch:
        self.states.apply(plan)
        return self.builder.build(plan)


def test_a_batch_mixing_chunk_decode_and_drafts_is_gathered_exactly():
    harness = Harness()
    batch = harness.step(
        plan_of(
            0,
            {"a": 5, "b": 1, "c": 3},
            {"a": 2, "b": 6, "c": 3},
            new_requests=[
                new("a", list(range(10, 20)), 10, 2),  # a middle chunk of its prompt
                new("b", list(range(30, 37)), 4, 6),  # one decode token
                new("c", list(range(50, 54)), 4, 3),  # the last token and two drafts
            ],
            draft_token_ids={"c": [91, 92]},
        )
    )
    assert batch.request_ids == ["b", "c", "a"]  # short queries first
    assert batch.input_ids.tolist() == [36, 53, 91, 92, 12, 13, 14, 15, 16]
    assert batch.positions.tolist() == [6, 3, 4, 5, 2, 3, 4, 5, 6]
    assert batch.attention.query_start_loc.tolist() == [0, 1, 4, 9]
    assert batch.attention.seq_lens.tolist() == [7, 6, 7]
    assert batch.attention.num_decode_requests == 1
    assert batch.attention.max_query_len == 5
    blocks = {"b": 100, "c": 200, "a": 0}
    expected = [
        (blocks[r] + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
        for r, position in zip("bcccaaaaa", batch.positions.tolist())
    ]
    assert batch.attention.slot_mapping.tolist() == expected
    assert batch.attention.block_table.tolist() == [[100, 101], [200, 201], [0, 1]]
    assert batch.is_sampling.tolist() == [True, True, False]
    assert batch.logits_start.tolist() == [0, 1, 4, 5]
    assert batch.output_rows.tolist() == [0, 1, 2, 3, 8]
    assert batch.logits.num_known.tolist() == [7, 4, 5, 6, 7]
    assert batch.prompt_logits is None


def test_unread_drafts_take_the_places_of_their_placeholders():
    """Of two models, beside drafts that the host knows; the widest row is not verified whole."""
    harness = Harness()
    tables = [
        DraftTable(HostTransfers(), torch.tensor(rows))
        for rows in ([[91, 92, 93], [81, -1, 83]], [[71, 72]])
    ]
    unread = {
        "a": DeviceDrafts(tables[0], 1, 3),
        "b": DeviceDrafts(tables[0], 0, 2),
        "d": DeviceDrafts(tables[1], 0, 1),
    }
    placeholders = {r: [DRAFT_ON_DEVICE] * len(drafts) for r, drafts in unread.items()}
    plan = plan_of(
        0,
        {"a": 4, "b": 4, "c": 3, "d": 2, "e": 1},
        {"a": 3, "b": 2, "c": 3, "d": 3, "e": 2},
        new_requests=[new(r, [ord(r) - 96] * 4, 4, 2) for r in "abcde"],
        draft_token_ids=placeholders | {"c": [61, 62]},
    )
    harness.states.apply(plan)
    batch = harness.builder.build(plan, unread)
    assert batch.request_ids == ["e", "d", "c", "a", "b"]
    assert batch.input_ids.tolist() == [5, 4, 71, 3, 61, 62, 1, 81, 0, 83, 2, 2, 91, 92]
    assert batch.input_ids.dtype == torch.int32
    assert batch.num_drafts.tolist() == [0, 1, 2, 3, 2]


def test_a_pass_may_be_given_its_tokens_by_the_device():
    harness = Harness()
    plan = plan_of(0, {"a": 4, "b": 4}, {"a": 0, "b": 0})
    plan.new_requests = [new(r, [1, 2, 3, 4], 4, 0) for r in "ab"]
    harness.step(plan)
    rows = np.array([harness.states.row_of[r] for r in "ab"])
    starts, ones = np.array([4, 5], np.int32), np.ones(2, np.int32)
    input_ids = torch.tensor([8, 9], dtype=torch.int32)
    tokens = harness.builder.gather(rows, starts, ones, input_ids)
    assert tokens.input_ids is input_ids
    assert tokens.positions.tolist() == [4, 5]
    assert tokens.attention.slot_mapping.tolist() == [1 * BLOCK_SIZE, 101 * BLOCK_SIZE + 1]


@pytest.mark.parametrize(
    ("params", "bad_words", "looks_back"),
    [
        ({"presence_penalty": 0.1}, (), True),
        ({"repetition_penalty": 1.1}, (), True),
        ({}, ((1, 2),), True),
        ({}, ((1,), (2,)), False),
        ({"logit_bias": {1: 2.0}, "min_tokens": 3, "allowed_token_ids": [1, 2]}, (), False),
    ],
)
def test_edits_look_back_where_they_depend_on_the_tokens_before(params, bad_words, looks_back):
    harness = Harness()
    request = new("a", [1, 2], 2, 0, **params)
    request.bad_words_token_ids = bad_words
    harness.step(plan_of(0, {"a": 2}, {"a": 0}, new_requests=[request]))
    assert harness.states.reads_output[harness.states.row_of["a"]] == looks_back


def test_prompt_logprob_rows_cover_each_prompt_token_but_the_first_once_over_any_chunks():
    for chunk in (1, 3, 4, 7, 12):
        harness = Harness()
        request = new("a", list(range(12)), 12, 0, prompt_logprobs=0)
        targets, computed = [], 0
        while computed < 12:
            num = min(chunk, 12 - computed)
            batch = harness.step(
                plan_of(
                    computed,
                    {"a": num},
                    {"a": computed},
                    new_requests=[request] if computed == 0 else [],
                )
            )
            if batch.prompt_logits is not None:
                targets += batch.prompt_logits.num_known.tolist()
                positions = batch.positions[batch.output_rows[len(batch.logits.row) :]]
                assert (positions.numpy() + 1 == batch.prompt_logits.num_known).all()
            computed += num
            harness.states.commit(int(batch.rows[0]), num, 0, [7] if computed == 12 else [])
        assert targets == list(range(1, 12))


def test_rows_stay_put_while_others_come_and_go():
    harness = Harness()
    harness.step(
        plan_of(
            0,
            dict.fromkeys("abc", 4),
            dict.fromkeys("abc", 0),
            new_requests=[new(r, [1, 2, 3, 4], 4, 0) for r in "abc"],
        )
    )
    rows = dict(harness.states.row_of)
    for request_id in "abc":
        harness.states.commit(rows[request_id], 4, 0, [9])
    batch = harness.step(
        plan_of(
            1,
            {"a": 1, "c": 1, "d": 2},
            {"a": 4, "c": 4, "d": 0},
            finished_request_ids=["b"],
            new_requests=[new("d", [5, 6], 2, 0)],
        )
    )
    assert harness.states.row_of == {"a": rows["a"], "c": rows["c"], "d": rows["b"]}
    assert batch.input_ids.tolist() == [9, 9, 5, 6]


def test_a_row_taken_again_keeps_no_parameter_of_its_last_request():
    harness = Harness()
    everything = {
        "temperature": 0.5,
        "top_p": 0.6,
        "top_k": 7,
        "min_p": 0.1,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "logit_bias": {1: 2.0},
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
    }
    first = new("a", [1, 2], 2, 0, **everything)
    harness.step(plan_of(0, {"a": 2}, {"a": 0}, new_requests=[first]))
    states, row = harness.states, harness.states.row_of["a"]
    assert states.draws[row].tolist() == [0.5, 0.6, 0.1, 7]
    assert states.penalties[row].tolist() == [1.5, 0.5, 0.25]
    assert states.num_logprobs[row] == 3
    assert states.wants_prompt_logprobs[row]
    assert states.edits_tokens[row]
    assert states.is_penalised[row]
    plain = new("b", [1, 2], 2, 0, temperature=0.0)
    harness.step(plan_of(1, {"b": 2}, {"b": 0}, finished_request_ids=["a"], new_requests=[plain]))
    assert states.row_of["b"] == row
    assert states.draws[row].tolist() == [0, 1, 0, 0]
    assert states.penalties[row].tolist() == [1, 0, 0]
    assert states.num_logprobs[row] == NO_LOGPROBS
    assert not states.wants_prompt_logprobs[row]
    assert not states.edits_tokens[row]
    assert not states.is_penalised[row]


def test_a_preempted_request_comes_back_in_the_plan_that_forgets_it():
    harness = Harness()
    first = plan_of(0, {"a": 3}, {"a": 0}, new_requests=[new("a", [1, 2, 3], 3, 0)])
    batch = harness.step(first)
    harness.states.commit(int(batch.rows[0]), 3, 0, [4])
    back = new("a", [1, 2, 3, 4], 3, 0)
    back.block_ids = [40, 41]
    batch = harness.step(
        plan_of(1, {"a": 4}, {"a": 0}, finished_request_ids=["a"], new_requests=[back])
    )
    assert batch.input_ids.tolist() == [1, 2, 3, 4]
    assert batch.attention.block_table.tolist() == [[40]]


@pytest.mark.parametrize(("accepted", "computed"), [([9], 5), ([91, 9], 6), ([91, 92, 9], 7)])
def test_commit_counts_accepted_drafts_and_forgets_rejected_ones(accepted, computed):
    harness = Harness()
    batch = harness.step(
        plan_of(
            0,
            {"a": 3},
            {"a": 4},
            new_requests=[new("a", [1, 2, 3, 4, 5], 4, 4)],
            draft_token_ids={"a": [91, 92]},
        )
    )
    row = int(batch.rows[0])
    harness.states.commit(row, 3, 2, accepted)
    states = harness.states
    assert states.num_computed_tokens[row] == computed == states.num_tokens[row] - 1
    assert states.token_ids[row, : states.num_tokens[row]].tolist() == [1, 2, 3, 4, 5, *accepted]


def test_a_plan_may_know_of_more_computed_tokens_but_never_of_fewer():
    harness = Harness()
    first = plan_of(0, {"a": 4}, {"a": 0}, new_requests=[new("a", list(range(12)), 12, 0)])
    batch = harness.step(first)
    harness.states.commit(int(batch.rows[0]), 4, 0, [])
    # Two blocks of KV came from another request.
    batch = harness.step(plan_of(1, {"a": 2}, {"a": 8}))
    assert batch.positions.tolist() == [8, 9]
    harness.states.commit(int(batch.rows[0]), 2, 0, [])
    with pytest.raises(AssertionError, match="computed 10, planned 8"):
        harness.step(plan_of(2, {"a": 1}, {"a": 8}))


def test_random_plans_gather_what_a_token_by_token_loop_gathers():
    rng = np.random.default_rng(3)
    harness = Harness()
    tokens = {r: rng.integers(0, 500, int(rng.integers(2, 40))).tolist() for r in "abcdef"}
    computed = {r: int(rng.integers(0, len(t))) for r, t in tokens.items()}
    scheduled = {
        r: int(rng.integers(1, len(tokens[r]) - computed[r] + 1))
        for r in rng.permutation(list("abcdef"))
    }
    batch = harness.step(
        plan_of(
            0,
            scheduled,
            computed,
            new_requests=[new(r, tokens[r], len(tokens[r]), computed[r]) for r in "abcdef"],
        )
    )
    ids, positions = [], []
    for r in batch.request_ids:
        for position in range(computed[r], computed[r] + scheduled[r]):
            ids.append(tokens[r][position])
            positions.append(position)
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert [scheduled[r] for r in batch.request_ids] == sorted(scheduled.values())
