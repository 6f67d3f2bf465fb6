"""What a worker knows of its own drafts, against plans that were made without knowing."""

import numpy as np
import pytest
import torch

from nano.device import HostTransfers
from nano.model_input.device_drafts import DeviceDrafts, DraftTable
from nano.model_input.own_drafts import OwnDrafts
from nano.step import DRAFT_ON_DEVICE, StepPlan


def on_device(*rows: list[int]) -> list[DeviceDrafts]:
    """The drafts of several requests, in one table."""
    table = torch.full((len(rows), max(map(len, rows))), -1, dtype=torch.int64)
    for row, token_ids in zip(table, rows):
        row[: len(token_ids)] = torch.tensor(token_ids)
    made = DraftTable(HostTransfers(), table)
    return [DeviceDrafts(made, index, len(token_ids)) for index, token_ids in enumerate(rows)]


def plan_ahead(step: int, asked: dict[str, int], **rest) -> StepPlan:
    """Each request has one token to compute, and so many drafts to verify."""
    return StepPlan(
        step=step,
        num_scheduled_tokens={request_id: 1 + num for request_id, num in asked.items()},
        draft_token_ids={r: [DRAFT_ON_DEVICE] * num for r, num in asked.items() if num},
        **rest,
    )


@pytest.mark.parametrize("are_unread", [False, True])
@pytest.mark.parametrize("num_asked", [1, 2, 3, 5])
def test_a_step_verifies_as_many_drafts_as_were_made_and_asked_for(are_unread, num_asked):
    own = OwnDrafts(shows_all=False)
    made = [[7, 8, 9], [5]]
    shown = own.keep(["a", "b"], on_device(*made) if are_unread else made)
    assert shown == ([[DRAFT_ON_DEVICE] * 3, [DRAFT_ON_DEVICE]] if are_unread else made)
    plan = plan_ahead(2, {"a": num_asked, "b": 2, "c": 2})
    filled = own.fill_in(plan)
    num = min(num_asked, 3)
    assert filled.plan.num_scheduled_tokens == {"a": 1 + num, "b": 2, "c": 1}
    expected = {"a": [7, 8, 9][:num], "b": [5]}
    if are_unread:
        hidden = {r: [DRAFT_ON_DEVICE] * len(ids) for r, ids in expected.items()}
        assert filled.plan.draft_token_ids == hidden
        assert filled.verified == {"c": []}
    else:
        assert filled.plan.draft_token_ids == expected
    assert own.read(filled) == {}
    assert filled.verified == expected | {"c": []}
    assert plan == plan_ahead(2, {"a": num_asked, "b": 2, "c": 2})  # its maker may look at it


@pytest.mark.parametrize("are_unread", [False, True])
def test_drafts_wait_for_the_next_step_of_their_request(are_unread):
    own = OwnDrafts(shows_all=False)
    own.keep(["a", "b"], on_device([7, 8], [5, 6]) if are_unread else [[7, 8], [5, 6]])
    filled = own.fill_in(plan_ahead(2, {"b": 2}))
    own.read(filled)
    own.keep(["b"], [[]])
    filled = own.fill_in(plan_ahead(3, {"a": 2, "b": 2}))
    own.read(filled)
    assert filled.verified == {"a": [7, 8], "b": []}


@pytest.mark.parametrize("how", ["finished_request_ids", "preempted_request_ids"])
def test_drafts_of_a_request_that_has_left_are_not_those_of_one_that_comes_by_its_name(how):
    own = OwnDrafts(shows_all=False)
    own.keep(["a"], on_device([7, 8]))
    filled = own.fill_in(plan_ahead(2, {"a": 2}, **{how: ["a"]}))
    own.read(filled)
    assert filled.verified == {"a": []}
    assert filled.plan.num_scheduled_tokens == {"a": 1}


@pytest.mark.parametrize("shows_all", [False, True])
def test_the_first_of_drafts_that_were_not_worth_the_step_is_told(shows_all):
    own = OwnDrafts(shows_all=shows_all)
    a, c, d = on_device([7, 8], [4, 3], [-1, 3])
    own.keep(["a", "b", "c", "d"], [a, [5, 6], c, d])
    asked = plan_ahead(2, {"a": 0, "b": 0, "c": 1, "d": 0})
    assert own.read(own.fill_in(asked)) == {"a": 7, "b": 5}


def test_a_core_that_is_shown_the_drafts_is_shown_those_that_could_be_guessed():
    own = OwnDrafts()
    assert own.keep(["a", "b"], on_device([7, -1, 9], [-1, 5, 6])) == [[7], []]
    assert own.fill_in(plan_ahead(2, {"a": 1, "b": 1})).verified == {"a": [7], "b": []}


def test_what_could_not_be_guessed_is_verified_as_the_token_that_stood_for_it():
    own = OwnDrafts(shows_all=False)
    own.keep(["a"], on_device([7, -1, 9]))
    filled = own.fill_in(plan_ahead(2, {"a": 3}))
    own.read(filled)
    assert filled.verified == {"a": [7, 0, 9]}


class Late:
    """A device whose copies are there when somebody has waited."""

    torch_device = torch.device("cpu")
    num_waits = 0

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def to_host(self, tensors):
        self.tensors = tensors
        return self

    def wait(self) -> list[np.ndarray]:
        self.num_waits += 1
        return [tensor.numpy() for tensor in self.tensors]


def test_nobody_waits_before_a_step_that_has_been_queued_is_read():
    device = Late()
    table = DraftTable(device, torch.tensor([[7, 8]]))
    own = OwnDrafts(shows_all=False)
    own.keep(["a"], [DeviceDrafts(table, 0, 2)])
    filled = own.fill_in(plan_ahead(2, {"a": 2}))
    assert device.num_waits == 0
    assert own.take_seconds_waited() == 0
    own.read(filled)
    assert device.num_waits == 1
    assert own.take_seconds_waited() > 0
    assert own.take_seconds_waited() == 0
