"""How a step is timed, and what follows for the token budget."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from nano.config import EngineConfig
from nano.resolve import resolve
from nano.worker.step_cost import measure_step
from nano.worker.worker import Worker
from tests.tiny import make_checkpoint


@dataclass
class FakeProbe:
    """A model of which a token costs a + b * context seconds, and a step `overhead` at least."""

    a: float
    b: float
    overhead: float = 0.0
    timed: list[float] = field(default_factory=list)

    def seconds(self, num_computed: int, num_tokens: int, num_runs: int) -> float:
        context = num_computed + num_tokens / 2
        seconds = max(self.overhead, num_tokens * (self.a + self.b * context))
        self.timed += [seconds] * num_runs
        return seconds


@pytest.mark.parametrize("a", [1e-5, 2e-4, 1e-3, 8e-3, 2e-2])
@pytest.mark.parametrize("costly_context", [500, 2000, 20_000])
def test_the_budget_fits_a_step_and_the_context_that_doubles_its_cost_is_found(a, costly_context):
    probe = FakeProbe(a, a / costly_context)
    cost = measure_step(probe, 32_768, None)
    assert cost.token_budget == max(16, min(8192, 0.35 / a)) // 8 * 8 or (
        0.9 < cost.token_budget / (0.35 / a) < 1.1
    )
    assert cost.seconds == pytest.approx(cost.token_budget * a, rel=0.1)
    assert cost.costly_context == pytest.approx(costly_context, rel=0.1)


@pytest.mark.parametrize("a", [1e-4, 1e-3, 1e-2])
def test_timing_takes_a_second_or_what_a_few_tokens_take(a):
    probe = FakeProbe(a, a / 1000)
    measure_step(probe, 32_768, None)
    assert sum(probe.timed) < max(1.0, 16 * 16 * a)


def test_a_budget_that_is_told_is_taken_and_its_step_predicted():
    cost = measure_step(FakeProbe(1e-3, 1e-6), 32_768, 1000)
    assert (cost.token_budget, cost.costly_context) == (1000, None)
    assert cost.seconds == pytest.approx(1.0, rel=0.1)


def test_a_model_without_room_for_two_contexts_gets_a_budget_all_the_same():
    assert measure_step(FakeProbe(1e-4, 1e-7), 16, None).token_budget % 8 == 0
    assert measure_step(FakeProbe(1e-4, 1e-7), 1, None).token_budget % 8 == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("probe"))


@pytest.mark.parametrize("max_model_len", [3, 64])
def test_a_probe_repeats_itself_and_leaves_the_engine_alone(checkpoint, max_model_len):
    args = {"model": str(checkpoint), "max_model_len": max_model_len, "max_num_batched_tokens": 8}
    worker = Worker(resolve(EngineConfig.from_args(args)))
    worker.load(show_progress=False)
    before = [cache.clone() for cache in worker.runner.context.kv_caches]
    first, again = (worker.target.probe.hidden(worker.target.model.forward, 5) for _ in range(2))
    assert first.shape == (min(5, max_model_len), 64)
    assert torch.equal(first, again)
    twice = worker.target.probe.hidden(lambda *inputs: 2 * worker.target.model.forward(*inputs), 5)
    assert torch.equal(twice, 2 * first)
    for cache, kept in zip(worker.runner.context.kv_caches, before, strict=True):
        assert torch.equal(cache.view(torch.int32), kept.view(torch.int32))
    assert not worker.runner.states.row_of
    worker.close()
    worker.close()
