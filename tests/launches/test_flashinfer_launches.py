"""Which wrapper of FlashInfer plans which step, and that each step is planned once.

FlashInfer is its torch model, in bfloat16 under a float32 model.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from nano.attention.backend import AttentionSetup
from nano.config import EngineConfig
from nano.launches.rehearsal import Rehearsal
from nano.launches.sequence import Step
from nano.layers.native_kernels import NativeKernels
from nano.worker import loaded_model
from tests.attention.flashinfer_launches import LaunchingRuntime
from tests.attention.flashinfer_model import Wrapper
from tests.attention.test_flashinfer_graphs import InBfloat16
from tests.launches.test_launches import (
    FULL,
    NUM_DRAFTS,
    NUM_LAYERS,
    PIECEWISE,
    SIZES,
    kinds,
    told,
)
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")


class Runtime(LaunchingRuntime):
    """Keeps what was planned: (wrapper, tokens of each request in a uniform step)."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[tuple[str, int | None]] = []
        made = vars(self.flashinfer)
        for name in [name for name in made if name.endswith("Wrapper")]:
            made[name] = self._keeping(made[name])

    def _keeping(self, make: Callable[..., Wrapper]) -> Callable[..., Wrapper]:
        def make_keeping(*args: Any, **options: Any) -> Wrapper:
            wrapper = make(*args, **options)
            plan = wrapper.plan

            def keep_and_plan(*args: Any, **options: Any) -> None:
                self.plans.append((type(wrapper).__name__, options.get("q_len_per_req")))
                with _disable_current_modes():  # the model's own checks are no launches
                    plan(*args, **options)

            wrapper.plan = keep_and_plan
            return wrapper

        return make_keeping


class FlashInfer(InBfloat16):
    @classmethod
    def for_model(cls, setup: AttentionSetup) -> "FlashInfer":
        return cls(dataclasses.replace(setup, dtype=torch.bfloat16), Runtime())


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    folder = tmp_path_factory.mktemp("flashinfer")
    checkpoint = make_checkpoint(folder, num_hidden_layers=NUM_LAYERS, head_dim=64)
    drafting = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
    args = {"model": str(checkpoint), "kv_cache_dtype": "bfloat16", **SIZES}
    config = EngineConfig.from_args(args | {"speculative_config": json.dumps(drafting)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded_model, "select_backend", lambda *_: FlashInfer)
        return Rehearsal(config, 4, NUM_DRAFTS, simulates_graphs=True)


@pytest.fixture(scope="module")
def steps(rehearsal: Rehearsal) -> dict[str, Step]:
    return {step.name: step for step in rehearsal.run()}


@pytest.mark.parametrize(("name", "query_len"), [("decode", 1), ("verify", NUM_DRAFTS + 1)])
def test_the_decode_wrapper_plans_a_uniform_step_for_its_graph(steps, name, query_len):
    assert kinds(steps[name]) == FULL
    rows = f"4 requests, {4 * query_len} rows"
    assert told(steps[name], "plan") == [f"DecodeWrapper, for a graph of 4 x {query_len}: {rows}"]


def test_the_prefill_wrapper_plans_a_mixed_step_for_all_layers(steps):
    assert kinds(steps["mixed"]) == PIECEWISE
    assert told(steps["mixed"], "plan") == ["PrefillWrapper, any mix of rows: 5 requests, 31 rows"]


def test_flashinfer_is_asked_for_one_plan_in_each_step(rehearsal, steps):
    """The last steps of the rehearsal: decode and verification thrice, one mixed, and no other."""
    decode, verify = ("DecodeWrapper", 1), ("DecodeWrapper", NUM_DRAFTS + 1)
    plans = rehearsal.worker.target.backend.runtime.plans
    assert plans[-7:] == [*[decode] * 3, *[verify] * 3, ("PrefillWrapper", None)]
