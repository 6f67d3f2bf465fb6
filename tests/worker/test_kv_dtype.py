"""What keys and values are stored as: by name, refused where no backend serves it, in the id."""

import dataclasses

import pytest
import torch

from nano import LLM, SamplingParams
from nano.attention.backend import AttentionSetup
from nano.attention.flashinfer_backend import FlashInferBackend
from nano.config import EngineConfig
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec
from nano.resolve import resolve
from nano.worker.loaded_model import kv_dtype
from nano.worker.worker import numerics_id
from tests.attention.flashinfer_model import ModelRuntime
from tests.tiny import make_checkpoint

SETTINGS = {"max_model_len": 64, "num_gpu_blocks_override": 8, "compile_mode": "eager"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("kv"))


@pytest.mark.parametrize(
    ("told", "computed", "stored"),
    [
        ("auto", "float64", "float64"),
        ("auto", "bfloat16", "bfloat16"),
        ("float16", "float32", "float16"),
        ("fp8", "bfloat16", "float8_e4m3fn"),
        ("fp8_e4m3", "float16", "float8_e4m3fn"),
    ],
)
def test_a_name_says_what_is_stored(told, computed, stored):
    assert kv_dtype(EngineConfig.from_args({"kv_cache_dtype": told, "dtype": computed})) == stored


@pytest.mark.parametrize("told", ["bfloat16", "fp8"])
def test_a_float64_model_stores_float64(told):
    config = EngineConfig.from_args({"kv_cache_dtype": told, "dtype": "float64"})
    with pytest.raises(ConfigError, match=f"kv_cache_dtype={told} needs dtype float32"):
        kv_dtype(config)


def test_a_cpu_refuses_float8_in_words(checkpoint):
    with pytest.raises(ConfigError, match="cpu: it caches float32 or bfloat16 only, not float8"):
        LLM(checkpoint, kv_cache_dtype="fp8", **SETTINGS)


def test_where_a_backend_serves_float8_its_scale_is_told_once(checkpoint, caplog):
    params = SamplingParams(max_tokens=8, temperature=0.0)
    options = {"kv_cache_dtype": "fp8", "attention_backend": "reference"} | SETTINGS
    with caplog.at_level("INFO", logger="nano"), LLM(checkpoint, **options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 7]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert caplog.text.count("float8_e4m3fn with a scale of 1") == 1


def test_the_id_names_what_is_stored_and_how_its_sums_are_divided(checkpoint):
    def id_of(kv_split: str, cached: str) -> str:
        layer = LayerKVSpec("layer", 2, 64, {"fp8": "float8_e4m3fn"}.get(cached, cached))
        setup = AttentionSetup(16, layer, 4, torch.bfloat16, torch.device("cpu"))
        backend = FlashInferBackend(dataclasses.replace(setup, kv_split=kv_split), ModelRuntime())
        args = {"model": str(checkpoint), "kv_cache_dtype": cached, **SETTINGS}
        return numerics_id(resolve(EngineConfig.from_args(args)), backend, "torch", "", {})

    ids = [id_of(*case) for case in (("none", "bfloat16"), ("fixed", "bfloat16"), ("none", "fp8"))]
    ids += [id_of("scheduler", "bfloat16")]
    assert len(set(ids)) == 4
    assert id_of("auto", "bfloat16") == ids[3]
