"""The rules that judge by probabilities, in a whole engine: residual, block, synthetic.

That they keep the target's distribution is shown in tests/sampling/test_exactness.py.
"""

from pathlib import Path

import pytest

from nano import LLM, SamplingParams
from nano.layers.native_kernels import NativeKernels
from nano.outputs import RequestOutput
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(
    not NativeKernels.is_available(), reason="bits are promised on our own kernels"
)

PROMPTS = [[1, 2, 3, 4] * 4] * 4 + [[7, 8, 9]] * 4
GREEDY = [SamplingParams(temperature=0.0, max_tokens=24)] * len(PROMPTS)
RANDOM = [
    SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=24, logprobs=1)
    for seed in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("other"), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def greedy(target) -> list[list[int]]:
    with LLM(target, max_model_len=128) as llm:
        return tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def make_llm(target: Path, draft: Path, rule: str) -> LLM:
    config = {
        "method": "draft_model",
        "model": str(draft),
        "rejection_sample_method": rule,
        "draft_length": "static",  # on which these rules' tokens depend
    }
    return LLM(target, max_model_len=128, speculative_config=config)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_a_request_gets_the_same_tokens_alone_and_in_a_batch_and_greedy_ones_are_the_targets(
    target, other, greedy, rule
):
    with make_llm(target, other, rule) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == greedy
        together = llm.generate(PROMPTS, RANDOM, use_tqdm=False)
        for prompt, params, output in zip(PROMPTS, RANDOM, together):
            alone = llm.generate(prompt, params, use_tqdm=False)
            assert tokens(alone) == [output.outputs[0].token_ids]
            completion = output.outputs[0]
            assert len(completion.logprobs) == len(completion.token_ids)
            for token_id, entry in zip(completion.token_ids, completion.logprobs):
                assert next(iter(entry)) == token_id
        stats = llm.stats()
    drafted, accepted = (f"spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted"))
    assert 0 < stats[accepted] < stats[drafted]


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_where_the_draft_is_the_target_everything_is_accepted(target, rule):
    with make_llm(target, target, rule) as llm:
        llm.generate(PROMPTS, RANDOM, use_tqdm=False)
        stats = llm.stats()
    assert stats["spec_decode_num_accepted_tokens"] == stats["spec_decode_num_draft_tokens"] > 50


def test_synthetic_acceptance_is_what_was_told_whatever_the_drafts_are(target):
    config = {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 0.0],
        "draft_length": "static",
    }
    with LLM(target, max_model_len=128, speculative_config=config) as llm:
        llm.generate(PROMPTS, RANDOM, use_tqdm=False)
        stats = llm.stats()
    offered, kept = (f"spec_decode_num_{kind}_tokens_per_pos" for kind in ("draft", "accepted"))
    assert stats[f'{kept}{{position="0"}}'] == stats[f'{offered}{{position="0"}}'] > 0
    assert stats[f'{kept}{{position="1"}}'] == 0 < stats[f'{offered}{{position="1"}}']
