"""dtype=bfloat16 on a CPU: what is multiplied is rounded, and the promise is kept."""

from functools import partial

import pytest
import torch
from torch import Tensor

from nano.layers.cpu_linear import BFloat16Weight
from nano.layers.native_kernels import BFloat16Kernels
from tests.attention.test_bfloat16_cache import PROMPTS
from tests.attention.test_bfloat16_cache import completions as completions_of
from tests.tiny import make_checkpoint
from tests.worker.positions import load_worker, logits_of_prompts

pytestmark = pytest.mark.skipif(not BFloat16Kernels.is_available(), reason="needs a C++ compiler")

SELF_QUANT = {"speculative_config": {"method": "self_quant", "num_speculative_tokens": 3}}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
completions = partial(completions_of, dtype="bfloat16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("bfloat16"), "llama")


def test_chunks_batches_blocks_and_drafts_are_invisible(checkpoint):
    wanted = completions(checkpoint)
    for prompt, alone in zip(PROMPTS, wanted):
        assert completions(checkpoint, [prompt]) == [alone]
    chunks = {"long_prefill_token_threshold": 5}
    shapes = (chunks, {"block_size": 3}, {"max_num_seqs": 1}, {"threads": 1}, SELF_QUANT, NGRAM)
    for shape in shapes:
        assert completions(checkpoint, **shape) == wanted, shape
    assert completions(checkpoint, dtype="float32") != wanted


@pytest.mark.slow
def test_compiled_pieces_give_the_same_bits(checkpoint):
    compiled = {"compile_mode": "compiled", "startup": "compiled-first"}
    assert completions(checkpoint, **compiled) == completions(checkpoint, compile_mode="eager")


def test_it_computes_what_float32_does_on_rounded_inputs(checkpoint, monkeypatch):
    prompts = [list(range(3, 60)), [7] * 9]
    in_float32 = BFloat16Weight.forward

    def logits(dtype: str) -> Tensor:
        options = {"dtype": dtype, "quantization": "bfloat16", "kv_cache_dtype": "float32"}
        worker = load_worker(str(checkpoint), **options)
        found = torch.cat(logits_of_prompts(worker, prompts, rows=16))
        worker.close()
        return found

    ours, plain = logits("bfloat16"), logits("float32")
    monkeypatch.setattr(
        BFloat16Weight, "forward", lambda self, x: in_float32(self, x.bfloat16().float())
    )
    twin = logits("float32")
    # Sums in another order may round an input of the next layer to the other side, now and then.
    assert (ours - twin).abs().mean() < (ours - plain).abs().mean() / 10


@pytest.mark.parametrize(("told", "cached"), [("auto", "bfloat16"), ("float32", "float32")])
def test_keys_and_values_are_bfloat16_too_unless_told(checkpoint, told, cached):
    worker = load_worker(str(checkpoint), dtype="bfloat16", kv_cache_dtype=told)
    assert {str(cache.dtype) for cache in worker.runner.context.kv_caches} == {f"torch.{cached}"}
    worker.close()


def test_quantised_layers_multiply_as_their_scheme_says(checkpoint):
    options = {"quantization": "int8", "kv_cache_dtype": "float32"}
    wanted = completions(checkpoint, dtype="float32", **options)
    assert completions(checkpoint, **options) == wanted
