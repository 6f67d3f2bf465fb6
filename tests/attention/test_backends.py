"""Every backend against plain softmax on ragged batches; what is written where; which is chosen."""

import dataclasses
import re

import pytest
import torch

from nano.attention.cpu_backend import CpuBackend
from nano.attention.exact_torch_backend import ExactTorchBackend
from nano.attention.op import ForwardContext, attend, attention, forward_context
from nano.attention.reference_backend import ReferenceBackend
from nano.attention.select import select_backend
from nano.attention.torch_backend import TorchBackend
from nano.device.recording_graph import RecordingPool
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec
from tests.attention.sequences import SPEC, Sequences, ragged

CPU = torch.device("cpu")
FLOAT32 = dataclasses.replace(SPEC, dtype="float32")
BFLOAT16 = dataclasses.replace(SPEC, dtype="bfloat16")

needs_kernel = pytest.mark.skipif(
    CpuBackend.unsupported_reason(FLOAT32, CPU) is not None,
    reason=str(CpuBackend.unsupported_reason(FLOAT32, CPU)),
)
# (backend, what it caches, how close it comes to float64)
BACKENDS = [
    pytest.param(ReferenceBackend, SPEC, 1e-12, id="reference"),
    pytest.param(ReferenceBackend, BFLOAT16, 2e-6, id="reference-bfloat16"),
    pytest.param(TorchBackend, SPEC, 1e-12, id="torch"),
    pytest.param(TorchBackend, BFLOAT16, 2e-6, id="torch-bfloat16"),
    pytest.param(ExactTorchBackend, SPEC, 1e-12, id="torch-exact"),
    pytest.param(ExactTorchBackend, BFLOAT16, 2e-6, id="torch-exact-bfloat16"),
    pytest.param(CpuBackend, FLOAT32, 2e-6, id="cpu", marks=needs_kernel),
    pytest.param(CpuBackend, BFLOAT16, 2e-6, id="cpu-bfloat16", marks=needs_kernel),
]


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 256])
def test_ragged_batches_equal_textbook_attention(backend, spec, close, block_size):
    sequences, ranges = ragged(backend, spec, block_size)
    out = sequences.step(ranges)
    wanted = torch.cat([sequences.expected(i)[start:end] for i, start, end in ranges])
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
@pytest.mark.parametrize("block_size", [4, 16])
def test_padding_rows_and_foreign_blocks_are_untouched(backend, spec, close, block_size):
    sequences, ranges = ragged(backend, spec, block_size)
    out = sequences.step(ranges, num_padding=5)
    assert (out[-5:] == 77.0).all()
    assert not out[:-5].isnan().any()
    written = sum(end for _, _, end in ranges) * 2 * spec.num_kv_heads * spec.head_dim
    assert int((~sequences.cache.isnan()).sum()) == written


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
def test_a_request_reads_kv_that_another_writes_in_the_same_step(backend, spec, close):
    sequences = Sequences([6, 8], backend, spec, block_size=4)
    for x in (sequences.k, sequences.v):
        x[0][:4] = x[1][:4]
    sequences.blocks[0][0] = sequences.blocks[1][0]  # shared; only request 1 computes it
    out = sequences.step([(0, 4, 6), (1, 0, 8)])
    wanted = torch.cat([sequences.expected(0)[4:], sequences.expected(1)])
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
def test_tokens_may_be_views_into_a_fused_projection(backend, spec, close):
    sequences = Sequences([5], backend, spec)
    ranges = [(0, 0, 5)]
    wanted = sequences.step(ranges)
    parts = [sequences.gather(x, ranges) for x in (sequences.q, sequences.k, sequences.v)]
    fused = torch.cat([part.flatten(1) for part in parts], 1)
    sizes = [part[0].numel() for part in parts]
    views = [part.unflatten(1, (-1, spec.head_dim)) for part in fused.split(sizes, 1)]
    assert not any(view.is_contiguous() for view in views)
    out = torch.empty_like(parts[0])
    sequences.backend.forward(*views, sequences.cache, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_a_number_spoils_neither_those_before_it_nor_its_neighbours(
    backend, spec, close, bad
):
    ranges = [(0, 0, 20), (1, 0, 300)]
    clean = Sequences([20, 300], backend, spec).step(ranges)
    spoilt = Sequences([20, 300], backend, spec)
    spoilt.k[1][7], spoilt.v[1][7] = bad, bad
    out = spoilt.step(ranges)
    torch.testing.assert_close(out[:27], clean[:27], rtol=close, atol=close)
    assert out[27:].isnan().all()


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
def test_in_a_later_chunk_it_spoils_those_that_see_it_and_in_the_next_all(backend, spec, close):
    sequences = {bad: Sequences([50], backend, spec) for bad in (False, True)}
    sequences[True].v[0][33] = float("nan")
    for start, end, num_good in ((0, 30, 30), (30, 40, 3), (40, 41, 0), (41, 50, 0)):
        clean, spoilt = (sequences[bad].step([(0, start, end)]) for bad in (False, True))
        torch.testing.assert_close(spoilt[:num_good], clean[:num_good], rtol=close, atol=close)
        assert spoilt[num_good:].isnan().all()


def test_torch_computes_a_step_without_reading_the_device_on_the_host():
    sequences, ranges = ragged(TorchBackend, SPEC, 16)
    q, k, v = (sequences.gather(x, ranges) for x in (sequences.q, sequences.k, sequences.v))
    sequences.plan(ranges)
    pool, out = RecordingPool(), torch.empty_like(q)
    with pool.capturing():
        graph = pool.new_graph()
        graph.begin()  # from here on it is refused
        sequences.backend.forward(q, k, v, sequences.cache, out)
        graph.end()
    wanted = torch.cat([sequences.expected(i)[start:end] for i, start, end in ranges])
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
def test_the_cache_takes_the_memory_that_its_spec_says(backend, spec, close):
    for block_size in (1, 5, 16):
        cache = Sequences([40], backend, spec, block_size).cache
        blocks = Sequences([40], backend, spec, block_size).num_blocks
        assert cache.nbytes == blocks * spec.bytes_per_block(block_size)


@needs_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (14, 2), (16, 1)])
def test_the_kernel_serves_every_head_size_and_group(dtype, head_dim, num_heads, num_kv_heads):
    spec = LayerKVSpec("layer", num_kv_heads, head_dim, dtype)
    sequences, ranges = ragged(CpuBackend, spec, 16, num_heads)
    out = sequences.step(ranges)
    wanted = torch.cat([sequences.expected(i)[start:end] for i, start, end in ranges])
    torch.testing.assert_close(out.double(), wanted, rtol=5e-6, atol=5e-6)


@needs_kernel
def test_a_bfloat16_cache_rounds_as_torch_does():
    halfway = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, 1e-40, 0.0, 0.1, float("inf")]
    low_bit = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # a NaN, barely
    odd = torch.cat([low_bit, torch.tensor([float("nan"), 1.0, 1e30, 7.0, 2.5, -3.3, 0.7])])
    values = torch.stack([torch.tensor(halfway), -torch.tensor(halfway), odd])[:, None]
    sequences = Sequences([3], CpuBackend, LayerKVSpec("layer", 1, 8, "bfloat16"), 1, num_heads=1)
    sequences.k[0], sequences.v[0] = values, values.flip(0)
    sequences.step([(0, 0, 3)])
    cached = sequences.cache[sequences.blocks[0], 0]  # [3, 2, 8]: in blocks of one, as they are
    wanted = torch.cat([values, values.flip(0)], 1).bfloat16()
    assert wanted.isnan().any()
    assert wanted.isinf().any()
    assert torch.equal(cached.isnan(), wanted.isnan())
    cached, wanted = (x[~wanted.isnan()].view(torch.int16) for x in (cached, wanted))
    assert torch.equal(cached, wanted)


@needs_kernel
def test_the_kernel_refuses_tensors_that_it_would_misread():
    sequences = Sequences([3], CpuBackend, FLOAT32)
    ranges = [(0, 0, 3)]
    sequences.step(ranges)
    q, k, v = (sequences.gather(x, ranges) for x in (sequences.q, sequences.k, sequences.v))
    backend, cache, out = sequences.backend, sequences.cache, torch.empty_like(q)
    with pytest.raises(RuntimeError, match="float32 elements expected"):
        backend.forward(q.double(), k, v, cache, out)
    with pytest.raises(RuntimeError, match="contiguous heads"):
        backend.forward(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, cache, out)
    with pytest.raises(RuntimeError, match="contiguous tensor"):
        backend.forward(q, k, v, cache, out.expand(2, -1, -1, -1)[:, 0])


def test_the_op_reads_the_forward_context_and_refuses_to_run_or_nest_without_one():
    sequences = Sequences([3], ReferenceBackend)
    sequences.plan([(0, 0, 3)])
    q, k, v = sequences.q[0], sequences.k[0], sequences.v[0]
    with pytest.raises(RuntimeError, match="outside forward_context"):
        attention(q, k, v, 0)
    context = ForwardContext(sequences.backend, [sequences.cache])
    with forward_context(context):
        torch.testing.assert_close(attention(q, k, v, 0), sequences.expected(0))
        for called in (attend, torch.ops.nano.attention, torch.ops.nano.attention.default):
            out = torch.empty_like(q)
            called(q, k, v, out, 0)
            torch.testing.assert_close(out, sequences.expected(0))
        with pytest.raises(RuntimeError, match="already running"), forward_context(context):
            pass


def test_selection_takes_the_first_that_serves_and_says_why_a_wanted_one_cannot():
    assert select_backend("auto", [SPEC], CPU) is ExactTorchBackend
    assert select_backend("reference", [SPEC], CPU) is ReferenceBackend
    with pytest.raises(ConfigError, match="cpu: it caches float32 or bfloat16 only, not float64"):
        select_backend("cpu", [SPEC], CPU)
    odd = dataclasses.replace(FLOAT32, head_dim=12)
    with pytest.raises(ConfigError, match="a head_dim that is a multiple of 8, not 12"):
        select_backend("cpu", [odd], CPU)


def test_a_cpu_caches_no_float8_and_says_so():
    float8 = dataclasses.replace(SPEC, dtype="float8_e4m3fn")
    reason = (
        "no attention backend serves this model: cpu: it caches float32 or bfloat16 only, not "
        "float8_e4m3fn | torch: it caches no float8_e4m3fn, which torch cannot write slot by slot"
    )
    for numerics in ("exact", "fast"):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            select_backend("auto", [float8], CPU, numerics)


def test_numerics_choose_between_the_torch_backends():
    assert select_backend("torch", [FLOAT32], CPU, "exact") is ExactTorchBackend
    assert select_backend("torch", [FLOAT32], CPU, "fast") is TorchBackend
    assert ExactTorchBackend.name != TorchBackend.name  # the numerics id tells them apart


@needs_kernel
def test_selection_prefers_the_native_kernel():
    assert select_backend("auto", [FLOAT32, BFLOAT16], CPU) is CpuBackend
    assert select_backend("auto", [FLOAT32], CPU, "fast") is CpuBackend
