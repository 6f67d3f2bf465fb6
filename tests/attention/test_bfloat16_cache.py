"""The engine with keys and values stored as bfloat16: asked for, and as invisible as float32."""

import pytest

from nano import LLM, SamplingParams
from nano.errors import ConfigError
from tests.attention.test_backends import needs_kernel
from tests.tiny import make_checkpoint

PROMPTS = ["a" * 40, "some words, and some more", "x", "a" * 40 + "b"]
PARAMS = SamplingParams(temperature=0.8, seed=3, logprobs=2, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("bfloat16-cache"), "llama")


def completions(checkpoint, prompts=PROMPTS, **engine_args) -> list:
    """Tokens and logprobs of each prompt."""
    options = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 256}
    with LLM(checkpoint, **(options | engine_args)) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@needs_kernel
def test_chunks_batches_and_blocks_are_invisible(checkpoint):
    wanted = completions(checkpoint, kv_cache_dtype="bfloat16")
    for prompt, alone in zip(PROMPTS, wanted):
        assert completions(checkpoint, [prompt], kv_cache_dtype="bfloat16") == [alone]
    for shape in ({"long_prefill_token_threshold": 5}, {"block_size": 3}, {"max_num_seqs": 1}):
        assert completions(checkpoint, kv_cache_dtype="bfloat16", **shape) == wanted
    assert completions(checkpoint, kv_cache_dtype="float32") != wanted
    assert completions(checkpoint) == completions(checkpoint, kv_cache_dtype="float32")


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_backends_of_torch_serve_it_too(checkpoint, backend):
    outputs = completions(checkpoint, kv_cache_dtype="bfloat16", attention_backend=backend)
    assert [len(token_ids) for token_ids, _ in outputs] == [12] * len(PROMPTS)


def test_a_float64_model_refuses_a_narrower_cache(checkpoint):
    with pytest.raises(ConfigError, match="kv_cache_dtype=bfloat16 needs dtype float32"):
        completions(checkpoint, dtype="float64", kv_cache_dtype="bfloat16")
