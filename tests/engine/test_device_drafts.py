"""Drafts of a model stay on the device: nobody waits for a pass, and nobody can tell.

The device here is the CPU with a log. What is read from it is copied when the copy is queued, as a
GPU's queue would, and handed out by `wait`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nano import LLM, SamplingParams
from nano.device import CpuDevice
from nano.device.recording_graph import RecordingCpu
from nano.layers.native_kernels import NativeKernels
from nano.spec import draft_model, draft_passes
from nano.spec.drafting_model import DraftingModel
from nano.step import DRAFT_ON_DEVICE, StepOutput
from nano.worker import worker
from nano.worker.model_runner import ModelRunner
from tests.engine.test_speculation import make_llm, proposer
from tests.host_reads import DeviceOfItsOwn, NoHostReads, mark

pytestmark = pytest.mark.skipif(
    not NativeKernels.is_available(), reason="bits are promised on our own kernels"
)

NUM_DRAFTS = 3
MODELS = ("other", "same", "self_quant")
PROMPTS = [[5, 9, 9, 7], [200, 3] * 9, list(range(40)), [17]]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.0, "logit_bias": {9: 2.0}, "min_tokens": 4},
]
PENALTIES = {"presence_penalty": 0.7, "repetition_penalty": 1.2}


class LoggedCopy:
    def __init__(self, log: list[str], tensors: Sequence[Tensor]):
        self._log = log
        self._arrays = [tensor.numpy().copy() for tensor in tensors]
        self._is_awaited = False

    def wait(self) -> list[np.ndarray]:
        if not self._is_awaited:
            is_drafts = self._arrays[0].shape[1:] == (NUM_DRAFTS,)
            self._log.append("wait for drafts" if is_drafts else "wait")
            self._is_awaited = True
        return self._arrays


class LoggedCpu(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def to_host(self, tensors: Sequence[Tensor]) -> LoggedCopy:
        return LoggedCopy(self.log, tensors)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LoggedCpu:
    """What engines of the test compute on. Its log has passes and steps too."""
    device = LoggedCpu()
    monkeypatch.setattr(worker, "make_device", lambda *_: device)

    def logged(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            device.log.append(word)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(DraftingModel, "run", logged("pass", DraftingModel.run))
    monkeypatch.setattr(ModelRunner, "forward", logged("step", ModelRunner.forward))
    return device


def requests(*kinds: dict[str, Any], length: int = 30) -> list[SamplingParams]:
    fixed = {"max_tokens": length, "ignore_eos": True}
    return [SamplingParams(seed=i, **(fixed | kind)) for i, kind in enumerate(kinds)]


def generate(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def drafting_steps(log: list[str]) -> list[list[str]]:
    """What the steps did that both verified drafts and made as many as they could."""
    starts = [i for i, word in enumerate(log) if word == "step"]
    found = [log[start + 1 : stop] for start, stop in itertools.pairwise(starts)]
    return [words for words in found[2:] if words.count("pass") == NUM_DRAFTS]


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    with make_llm(target, []) as llm:
        yield llm


def watched(llm: LLM) -> list[StepOutput]:
    """The outputs of the worker's steps, from here on."""
    outputs: list[StepOutput] = []
    executor = llm._client._core._executor  # type: ignore[attr-defined]
    execute = executor.execute

    def watch(plan):
        outputs.append(execute(plan))
        return outputs[-1]

    executor.execute = watch
    return outputs


@pytest.mark.parametrize("name", MODELS)
def test_a_step_ahead_waits_once_for_drafts_and_for_no_pass(target, other, plain, device, name):
    params = requests(*KINDS)
    options = [proposer(name, target, other, NUM_DRAFTS)]
    with make_llm(target, options, async_scheduling=True) as llm:
        device.log.clear()
        assert generate(llm, params) == generate(plain, params)
    found = drafting_steps(device.log)
    assert len(found) > 2
    for words in found:
        assert words == ["wait for drafts", "wait", "pass", "pass", "pass"]


def test_a_step_that_is_not_ahead_waits_for_its_drafts_behind_all_passes(
    target, other, plain, device
):
    params = requests(*KINDS)
    with make_llm(target, [proposer("other", target, other, NUM_DRAFTS)]) as llm:
        device.log.clear()
        assert generate(llm, params) == generate(plain, params)
    found = drafting_steps(device.log)
    assert len(found) > 2
    for words in found:
        assert words == ["wait", "pass", "pass", "pass", "wait for drafts"]


@pytest.mark.parametrize(
    ("edits", "looks_back"),
    [
        (PENALTIES, True),
        ({"frequency_penalty": 0.4}, True),
        ({"bad_words": ["ab"]}, True),
        ({"logit_bias": {8: 1.0}, "min_tokens": 20, "allowed_token_ids": [*range(100)]}, False),
    ],
)
def test_passes_are_read_only_where_edits_look_at_the_drafts(
    target, other, plain, device, edits, looks_back
):
    """ "same" samples as the target does: it is right always if it sees the drafts, too."""
    params = requests(KINDS[0], {"temperature": 0.9} | edits, KINDS[1])
    options = [proposer("same", target, other, NUM_DRAFTS)]
    with make_llm(target, options, async_scheduling=True) as llm:
        device.log.clear()
        assert generate(llm, params) == generate(plain, params)
        stats = llm.stats()
    drafted = stats["spec_decode_num_draft_tokens"]
    assert stats["spec_decode_num_accepted_tokens"] == drafted > 50
    between = ["wait"] * looks_back
    found = drafting_steps(device.log)
    assert len(found) > 2
    for words in found[:3]:  # later the one request may want fewer drafts than others
        assert words[:2] == ["wait for drafts", "wait"]
        assert words[2:] == ["pass", *between, "pass", *between, "pass"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", ["same", "self_quant"])
@pytest.mark.parametrize("method", ["match", "residual", "block"])
def test_a_model_whose_logits_are_no_numbers_in_some_pass_costs_drafts_and_nothing_else(
    target, other, plain, monkeypatch, name, is_async, method
):
    """Greedy requests are matched under any rule, so their tokens can be compared."""
    params = requests(*[KINDS[0]] * 3, KINDS[1] if method == "match" else KINDS[0])
    expected = generate(plain, params)
    config = {
        "proposers": [proposer(name, target, other, NUM_DRAFTS)],
        "draft_length": "static",
        "rejection_sample_method": method,
    }
    more = {"max_model_len": 128, "async_scheduling": is_async}
    with LLM(target, speculative_config=config, **more) as llm:
        (drafting,) = llm._client._core._executor._worker.speculation.drafting.values()
        compute, num_calls, outputs = drafting.model.compute_logits, 0, watched(llm)

        def spoilt(hidden: Tensor) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            logits = compute(hidden)
            if num_calls % NUM_DRAFTS == 2:  # the second pass of the loop
                logits[num_calls % len(logits)] = torch.nan
            return logits

        monkeypatch.setattr(drafting.model, "compute_logits", spoilt)
        assert generate(llm, params) == expected
        stats = llm.stats()
    assert stats["spec_decode_num_accepted_tokens"] > 0
    made = [ids for output in outputs for ids in output.draft_token_ids if ids]
    verified = [ids for output in outputs for ids in output.verified_token_ids.values()]
    if is_async:  # what is not read is verified in its whole length
        assert any(ids[1] == 0 for ids in verified if len(ids) == NUM_DRAFTS)
    else:
        assert min(map(len, made)) == 1 < max(map(len, made))


@pytest.mark.parametrize("method", ["residual", "block"])
def test_unread_drafts_are_judged_by_the_probabilities_they_were_drawn_from(target, other, method):
    """A draft model that is the target: where p and q are equal, every draft is kept."""
    params = requests(KINDS[1], KINDS[0], KINDS[2], KINDS[1] | PENALTIES)
    config = {
        "proposers": [proposer("same", target, other, NUM_DRAFTS)],
        "draft_length": "static",
        "rejection_sample_method": method,
    }
    with LLM(target, speculative_config=config, max_model_len=128, async_scheduling=True) as llm:
        generate(llm, params)
        stats = llm.stats()
    drafted = stats["spec_decode_num_draft_tokens"]
    assert stats["spec_decode_num_accepted_tokens"] == drafted > 50


@pytest.mark.parametrize("name", ["other", "self_quant"])
def test_drafts_from_text_and_unread_ones_of_a_model_are_verified_in_one_step(
    target, other, plain, name
):
    """The prompt of the one repeats itself; that of the other says nothing to ngram."""
    params = requests({"temperature": 0.8, "allowed_token_ids": [3, 200]}, {"temperature": 0.8})
    prompts = [PROMPTS[1], PROMPTS[3]]
    names = ("ngram", name)
    options = [proposer(one, target, other, NUM_DRAFTS) for one in names]
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params, use_tqdm=False)]
    with make_llm(target, options, async_scheduling=True) as llm:
        outputs = watched(llm)
        for _ in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in found] == expected
    mixed = [output for output in outputs if set(names) <= set(output.draft_sources)]
    assert mixed
    for output in mixed:
        for ids, source in zip(output.draft_token_ids, output.draft_sources):
            assert (DRAFT_ON_DEVICE in ids) == (source == name)
    told = [ids for output in outputs for ids in output.verified_token_ids.values()]
    assert told
    assert not any(DRAFT_ON_DEVICE in ids for ids in told)


@pytest.mark.parametrize("is_async", [False, True])
def test_every_pass_behind_the_first_is_a_full_graph(target, other, plain, monkeypatch, is_async):
    device = RecordingCpu()
    monkeypatch.setattr(worker, "make_device", lambda *_: device)
    params = requests(*KINDS, length=12)
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "compile_mode": "eager"}
    options = [proposer("other", target, other, NUM_DRAFTS)]
    with make_llm(target, options, async_scheduling=is_async, **small) as llm:
        (loaded,) = llm._client._core._executor._worker.speculation.loaded
        outputs = watched(llm)
        assert generate(llm, params) == generate(plain, params)
    (graphs,) = loaded.graphs
    num_passes = [output.num_draft_passes for output in outputs]
    assert max(num_passes) == NUM_DRAFTS
    assert graphs.counts.num_full >= sum(max(0, count - 1) for count in num_passes) > 0
    assert not graphs.counts.eager


@pytest.mark.parametrize("edits", [{}, PENALTIES])
def test_the_host_looks_at_nothing_of_a_pass(target, other, plain, monkeypatch, edits):
    """Not by the ways that `Device.to_host` does not see either."""
    device = DeviceOfItsOwn()
    monkeypatch.setattr(worker, "make_device", lambda *_: device)
    num_waits = []

    def guarded(drafting, *args):
        mark([*drafting.model.parameters(), *drafting.model.buffers()])
        before = device.num_waits
        with NoHostReads():
            found = draft_passes.draft_ahead(drafting, *args)
        num_waits.append(device.num_waits - before)
        return found

    monkeypatch.setattr(draft_model, "draft_ahead", guarded)
    params = requests(*KINDS[:3], KINDS[0] | edits)
    options = [proposer("other", target, other, NUM_DRAFTS)]
    with make_llm(target, options, async_scheduling=True, compile_mode="eager") as llm:
        assert generate(llm, params) == generate(plain, params)
    assert max(num_waits) == (NUM_DRAFTS - 1 if edits else 0)
