"""Our CPU kernels at the shapes of SmolLM2-135M, and torch's on the same work."""

import pytest
import torch
from torch.nn import functional

from nano.attention.cpu_backend import CpuBackend
from nano.attention.torch_backend import TorchBackend
from nano.kv_spec import LayerKVSpec
from nano.layers.cpu_linear import PackedWeight
from tests.attention.test_backends import Sequences

# (outputs, inputs, how many: together larger than the last-level cache, as a model's layers are)
SHAPES = [(1536, 576, 24), (8960, 1536, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 8, 64, 256])
@pytest.mark.parametrize("kernel", ["native bfloat16", "native float32", "torch float32"])
def test_linear(benchmark, kernel: str, num_rows: int, shape: tuple[int, int, int]):
    num_outputs, num_inputs, count = shape
    weights = [torch.randn(num_outputs, num_inputs) for _ in range(count)]
    if kernel == "native bfloat16":
        weights = [weight.bfloat16().float() for weight in weights]
    x = torch.randn(num_rows, num_inputs)
    if kernel == "torch float32":
        benchmark(lambda: [functional.linear(x, weight) for weight in weights])
    else:
        packed = [PackedWeight(weight, None) for weight in weights]
        benchmark(lambda: [weight(x) for weight in packed])


@pytest.mark.parametrize("backend", [CpuBackend, TorchBackend])
@pytest.mark.parametrize(
    ("num_requests", "seq_len", "query_len"), [(1, 512, 1), (8, 512, 1), (8, 512, 5), (1, 512, 512)]
)
def test_attention(benchmark, backend, num_requests: int, seq_len: int, query_len: int):
    spec = LayerKVSpec("layer", num_kv_heads=3, head_dim=64, dtype="float32")
    sequences = Sequences([seq_len] * num_requests, backend, spec, num_heads=9)
    if query_len < seq_len:
        sequences.step([(i, 0, seq_len - query_len) for i in range(num_requests)])
    ranges = [(i, seq_len - query_len, seq_len) for i in range(num_requests)]
    sequences.plan(ranges)
    q, k, v = (sequences.gather(x, ranges, 0) for x in (sequences.q, sequences.k, sequences.v))
    out = torch.empty_like(q)
    benchmark(sequences.backend.forward, q, k, v, sequences.cache, out)
