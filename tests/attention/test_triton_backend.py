"""The Triton backend: as textbook attention (in the interpreter), and compiled for GPUs."""

import dataclasses

import pytest
import torch

from nano.attention.select import select_backend
from nano.attention.triton_backend import (
    RANGE,
    TritonBackend,
    capability_reason,
    largest_value,
    layer_reason,
    tile_of,
)
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec
from tests.triton_compiler import ARCHITECTURES, Compiled, compile_for
from tests.triton_interpreter import run_interpreted

SPEC = LayerKVSpec("layer", num_kv_heads=8, head_dim=128, dtype="bfloat16")
WORDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
}
MOST_STACK_BYTES = 64  # per thread; a spilled accumulator alone would be 128


def test_the_kernels_equal_textbook_attention():
    run_interpreted("tests/attention/triton_cases.py")


def compile_attend(
    architecture: int, dtype: torch.dtype, cached: torch.dtype, head_dim: int
) -> Compiled:
    from nano.attention.triton_kernels import attend

    tile = tile_of(dtype, head_dim)
    types = {"q": f"*{WORDS[dtype]}", "cache": f"*{WORDS[cached]}", "out": f"*{WORDS[dtype]}"}
    types |= {"table": "*i32", "rows": "*i32", "totals": "*fp32", "sums": "*fp32", "scale": "fp32"}
    layer = {
        "NUM_KV_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "D": max(16, 1 << (head_dim - 1).bit_length()),
        "BLOCK_SIZE": 16,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.positions,
        "RANGE": RANGE,
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile_for(architecture, attend, types, layer, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_compiles_for_tensor_cores_with_few_spills(architecture, head_dim):
    compiled = compile_attend(architecture, torch.bfloat16, torch.bfloat16, head_dim)
    assert compiled.stack_bytes <= MOST_STACK_BYTES
    product = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]
    assert product in compiled.ptx
    assert compiled.shared_bytes <= 99 * 1024  # what the smallest GPUs of a generation have


@pytest.mark.parametrize(
    ("dtype", "cached", "head_dim"),
    [
        (torch.bfloat16, torch.bfloat16, 80),
        (torch.bfloat16, torch.bfloat16, 256),
        (torch.float16, torch.float8_e4m3fn, 128),
        (torch.float32, torch.float32, 64),
        (torch.float32, torch.bfloat16, 128),
    ],
)
def test_attention_compiles_for_other_dtypes_and_heads_with_few_spills(dtype, cached, head_dim):
    assert compile_attend(90, dtype, cached, head_dim).stack_bytes <= MOST_STACK_BYTES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_write_and_the_merge_compile_without_spills(architecture):
    from nano.attention.triton_kernels import merge_ranges, write_kv

    tile = tile_of(torch.bfloat16, 128)
    layer = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "D": 128}
    types = {"k": "*bf16", "v": "*bf16", "slots": "*i64", "cache": "*bf16"}
    largest = {"LARGEST": largest_value(torch.bfloat16)}
    constants = layer | largest | {"PADDED_HEADS": 8, "BLOCK_SIZE": 16}
    assert compile_for(architecture, write_kv, types, constants).stack_bytes == 0
    types = {"out": "*bf16", "rows": "*i32", "totals": "*fp32", "sums": "*fp32"}
    constants = layer | {"GROUP": 4, "BLOCK_M": tile.rows, "RANGE": RANGE}
    merged = compile_for(architecture, merge_ranges, types, constants, num_warps=tile.num_warps)
    assert merged.stack_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_value_is_the_last_that_stays_finite(dtype):
    largest = torch.tensor(largest_value(dtype))
    assert largest.to(dtype).isfinite()
    assert not torch.nextafter(largest, torch.tensor(torch.inf)).to(dtype).isfinite()


def test_the_largest_value_of_fp8_rounds_to_its_largest():
    assert largest_value(torch.float8_e4m3fn) == torch.tensor(464.0).nextafter(torch.tensor(0.0))


def test_refusals_name_the_value_and_the_limit():
    assert layer_reason(SPEC) is None
    assert layer_reason(dataclasses.replace(SPEC, dtype="float64")) == (
        "it caches float32, bfloat16, float16, float8_e4m3fn only, not float64"
    )
    assert layer_reason(dataclasses.replace(SPEC, head_dim=512)) == (
        "it needs a head_dim of at most 256, not 512"
    )
    assert capability_reason(SPEC, (8, 0)) is None
    assert capability_reason(SPEC, (7, 5)) == (
        "a bfloat16 cache needs compute capability 8.0, not 7.5"
    )
    fp8 = dataclasses.replace(SPEC, dtype="float8_e4m3fn")
    assert capability_reason(fp8, (8, 6)) == (
        "a float8_e4m3fn cache needs compute capability 8.9, not 8.6"
    )
    assert capability_reason(fp8, (9, 0)) is None


def test_it_is_refused_on_a_cpu_with_the_reason():
    assert TritonBackend.unsupported_reason(SPEC, torch.device("cpu")) == (
        "it runs on cuda only, not on cpu"
    )
    with pytest.raises(ConfigError, match="triton: it runs on cuda only, not on cpu"):
        select_backend("triton", [SPEC], torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_by_itself():
    reason = TritonBackend.unsupported_reason(SPEC, torch.device("cuda"))
    assert reason == "torch finds no CUDA device"
