"""Sampling is compared with torch: what differs is a failure unless the race was that close."""

import torch

from nano.gpu_check import sampling_checks
from nano.gpu_check.report import Outcome
from nano.gpu_check.sampling_checks import check_sampling
from nano.sampling.torch_backend import TorchSampling
from tests.gpu_check.boxes import found, quiet_box


def test_a_device_that_draws_as_torch_does_passes(tmp_path):
    box = quiet_box(tmp_path)
    check_sampling(box)
    (finding,) = found(box, Outcome.PASSED)
    assert finding.numbers["rows"] == box.sizes.num_sampled_rows
    assert finding.numbers["different"] == 0


def test_a_row_that_draws_another_token_is_named(tmp_path, monkeypatch):
    class Faulty(TorchSampling):
        name = "faulty"

        def draw(self, logits, rows, table, processed):
            tokens = torch.as_tensor(super().draw(logits, rows, table, processed)).clone()
            tokens[6] = 3
            return tokens

    monkeypatch.setattr(sampling_checks, "select_backend", lambda *_: Faulty())
    box = quiet_box(tmp_path)
    check_sampling(box)
    (failure,) = found(box, Outcome.FAILED)
    assert failure.name == "faulty draws as torch does"
    assert failure.detail.startswith("row 6: 3, not ")
    assert failure.numbers["race_gap"] > 1e-4


def test_a_banned_token_is_infinitely_far(tmp_path, monkeypatch):
    class Faulty(TorchSampling):
        def draw(self, logits, rows, table, processed):
            tokens = torch.as_tensor(super().draw(logits, rows, table, processed)).clone()
            tokens[0] = int((logits[0] == -torch.inf).nonzero()[0])
            return tokens

    monkeypatch.setattr(sampling_checks, "select_backend", lambda *_: Faulty())
    box = quiet_box(tmp_path)
    check_sampling(box)
    assert found(box, Outcome.FAILED)[0].numbers["race_gap"] == float("inf")
