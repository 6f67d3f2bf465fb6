"""Tokens: what an engine answers in each mode, against the same engine in eager mode.

Where the order of sums is not fixed, another mode rounds in another way, and a near-tie may fall to
the other side; from there on texts differ. So the first difference is judged, by two numbers:

    noise   the largest difference of a log probability before it: what rounding does here
    gap     by how much the logits would have to move to give the other token

Both must be within the bound of the dtype. float32 makes this sharp; in bfloat16 logits of 8 to 16
are 1/16 apart, and some such steps add up over the layers.
"""

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nano.gpu_check.box import Box
from nano.gpu_check.models import size_of
from nano.gpu_check.modes import EAGER, PLAIN_MODES, Mode, drafting_modes, guessing_modes
from nano.llm import LLM
from nano.outputs import CompletionOutput
from nano.sampling.noise import log_exponential
from nano.sampling_params import SamplingParams

LOGIT_BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}  # an exact engine has 0
_TEMPERATURES = (0.0, 0.8)  # in turn
_NUM_LOGPROBS = 8
_NUM_LOOPED = 6  # tokens that a repetitive prompt repeats
_ENGINE_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first leaves the expected one."""

    request: int
    position: int
    token_id: int  # -1: the answer has ended
    expected_token_id: int
    gap: float  # of logits; infinite if the logits that are known exclude the token

    def __str__(self) -> str:
        return (
            f"request {self.request} differs first at token {self.position}: {self.token_id}, not "
            f"{self.expected_token_id}, logit gap {self.gap:.2g}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One mode's answers beside the expected ones."""

    num_identical: int
    noise: float  # largest difference of log probabilities up to the first divergence
    divergences: list[Divergence]

    @property
    def gap(self) -> float:
        return max((divergence.gap for divergence in self.divergences), default=0.0)


def check_tokens(box: Box) -> None:
    for name, dtype in box.sizes.token_models:
        folder = box.models.target(name)
        model = _CheckedModel(box, f"{name} {dtype}", folder, dtype)
        for mode in (*PLAIN_MODES, *drafting_modes(box.models.draft(name)), *guessing_modes()):
            label = f"{model.label}, {mode.name}"
            box.attempt(label, partial(model.check, mode), seconds=_ENGINE_SECONDS, mode=mode.name)


class _CheckedModel:
    """One model, and what it answers in the first mode."""

    def __init__(self, box: Box, label: str, folder: Path, dtype: str):
        self.label = label
        self._box, self._folder, self._dtype = box, folder, dtype
        self._requests = _requests(box, size_of(folder).vocab_size)
        self._expected: list[CompletionOutput] | None = None

    def check(self, mode: Mode) -> None:
        """Raises what the engine raises."""
        box, label = self._box, f"{self.label}, {mode.name}"
        if self._expected is None and mode is not EAGER:
            box.report.leave_out(label, f"nothing to compare with: {EAGER.name} gave no answers")
            return
        answers, is_exact = _answers(box, self._folder, self._dtype, mode, self._requests)
        self._expected = self._expected or answers
        bound = LOGIT_BOUNDS["bfloat16" if self._dtype == "auto" and box.is_gpu else "float32"]
        found = compare(answers, self._expected, self._requests)
        _judge(box, label, found, 0.0 if is_exact else bound)


def _requests(box: Box, vocab_size: int) -> list[Asked]:
    """Prompts of several lengths, every second one repetitive; greedy and drawn in turn."""
    generator = torch.Generator().manual_seed(2)
    requests = []
    for i in range(box.sizes.num_requests):
        length = 5 + 23 * i % 90
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        params = SamplingParams(
            temperature=_TEMPERATURES[i // 2 % 2],
            seed=i,
            max_tokens=box.sizes.num_tokens,
            ignore_eos=True,
            logprobs=_NUM_LOGPROBS,
        )
        requests.append(Asked((ids[:_NUM_LOOPED] * length)[:length] if i % 2 else ids, params))
    return requests


def engine_args(box: Box, dtype: str, max_num_requests: int, max_num_tokens: int) -> dict[str, Any]:
    """What all engines of the check have in common."""
    return {
        "device": box.device_name,
        "dtype": dtype,
        "attention_backend": box.backend_for(dtype),
        "generation_config": "vllm",
        "max_num_seqs": max_num_requests,
        "max_num_batched_tokens": max_num_tokens,
    }


def _answers(
    box: Box,
    folder: Path,
    dtype: str,
    mode: Mode,
    requests: Sequence[Asked],
) -> tuple[list[CompletionOutput], bool]:
    """What the engine says, and whether it promises bits. Raises what the engine raises."""
    args = engine_args(box, dtype, len(requests), max_num_tokens=64)  # long prompts are cut
    args |= {"max_model_len": 256, "num_gpu_blocks_override": 16 * len(requests)}
    try:
        with LLM(folder, **(args | mode.args)) as llm:
            prompts = [{"prompt_token_ids": asked.prompt} for asked in requests]
            params = [asked.params for asked in requests]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            is_exact = llm.is_exact
    finally:
        gc.collect()  # an engine has cycles, and the next one measures what is free
    failed = [output.outputs[0].error for output in outputs if output.outputs[0].error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return [output.outputs[0] for output in outputs], is_exact


def _judge(box: Box, name: str, found: Comparison, bound: float) -> None:
    total = found.num_identical + len(found.divergences)
    worst = max(found.divergences, key=lambda divergence: divergence.gap, default=None)
    box.report.check(
        name,
        max(found.noise, found.gap) <= bound,
        f"bound {bound:g}" + (f"; {worst}" if worst else ""),
        identical=found.num_identical,
        of=total,
        noise=found.noise,
    )


def compare(
    answers: Sequence[CompletionOutput],
    expected: Sequence[CompletionOutput],
    requests: Sequence[Asked],
) -> Comparison:
    """Answers to the same requests, one by one."""
    noise = 0.0
    divergences = []
    for request, (ours, wanted) in enumerate(zip(answers, expected)):
        pairs = zip(ours.token_ids, wanted.token_ids)
        position = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
        shared = min(len(ours.token_ids), len(wanted.token_ids)) if position is None else position
        noise = max([noise, *_shifts(ours, wanted, range(shared))])
        if ours.token_ids == wanted.token_ids:
            continue
        if position is None:  # one has ended
            divergences.append(Divergence(request, shared, -1, -1, math.inf))
            continue
        noise = max([noise, *_shifts(ours, wanted, [position])])
        gap = _gap(ours, wanted, position, requests[request])
        token_ids = ours.token_ids[position], wanted.token_ids[position]
        divergences.append(Divergence(request, position, *token_ids, gap))
    return Comparison(len(answers) - len(divergences), noise, divergences)


def _shifts(
    ours: CompletionOutput, wanted: CompletionOutput, positions: Iterable[int]
) -> Iterable[float]:
    """How far the log probabilities lie apart of the tokens that both sides tell of."""
    assert ours.logprobs is not None
    assert wanted.logprobs is not None
    for position in positions:
        left, right = ours.logprobs[position], wanted.logprobs[position]
        for token_id in left.keys() & right.keys():
            shift = abs(left[token_id].logprob - right[token_id].logprob)
            yield math.inf if math.isnan(shift) else shift


def _gap(ours: CompletionOutput, wanted: CompletionOutput, position: int, asked: Asked) -> float:
    """By how much the logits preferred the wanted token to ours.

    A greedy token wins by its logit, a drawn one by logit - temperature * log E, with noise E that
    is the same in every mode (see `sampling.noise`).
    """
    assert ours.logprobs is not None
    assert wanted.logprobs is not None
    token_id, wanted_id = ours.token_ids[position], wanted.token_ids[position]
    left, right = ours.logprobs[position], wanted.logprobs[position]
    if token_id in right:
        gap = right[wanted_id].logprob - right[token_id].logprob
    elif wanted_id in left:
        gap = left[wanted_id].logprob - left[token_id].logprob
    elif asked.params.is_greedy:
        return math.inf
    else:  # neither is among the other side's best: each tells of its own
        gap = right[wanted_id].logprob - left[token_id].logprob
    if not asked.params.is_greedy:
        assert asked.params.seed is not None
        ids = torch.tensor([wanted_id, token_id], dtype=torch.int32)
        noise = log_exponential(asked.params.seed, len(asked.prompt) + position, ids)
        gap -= asked.params.temperature * float(noise[0] - noise[1])
    return abs(gap)
