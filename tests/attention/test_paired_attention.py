"""Attention that multiplies bfloat16 in pairs: what is rounded, and whose bits are whose."""

import dataclasses

import pytest
import torch
from torch import Tensor

from nano.attention import cpu_backend
from nano.attention.backend import AttentionSetup
from nano.attention.cpu_backend import CpuBackend
from nano.kv_spec import LayerKVSpec
from tests.attention.sequences import Sequences, ragged
from tests.attention.test_backends import BFLOAT16, needs_kernel
from tests.attention.test_bits import LENGTHS, in_parts, num_threads, whole
from tests.other_cpus import AVX2, computed_with, needs_avx2

__all__ = ["num_threads"]  # a fixture
pytestmark = needs_kernel

HEAD_DIMS = [8, 24, 64, 80, 128]


class PairedBackend(CpuBackend):
    """As `for_model` makes it for a model of dtype bfloat16."""

    def __init__(self, block_size: int, scale: float):
        super().__init__(block_size, scale)
        self._is_paired = True


def rounded(sequences: Sequences) -> list[Tensor]:
    """Textbook attention of each request on queries that are rounded as the kernel rounds them."""
    factor = sequences.spec.head_dim**-0.5 / torch.log(torch.tensor(2.0, dtype=torch.float64))
    sequences.q = [(q.float() * factor.float()).bfloat16().double() / factor for q in sequences.q]
    return [sequences.expected(i) for i in range(len(sequences.q))]


@pytest.mark.parametrize("block_size", [1, 3, 16, 24, 256])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (14, 2)])
def test_it_is_textbook_attention_with_queries_and_weights_rounded(
    block_size, head_dim, num_heads, num_kv_heads
):
    spec = LayerKVSpec("layer", num_kv_heads, head_dim, "bfloat16")
    sequences, ranges = ragged(PairedBackend, spec, block_size, num_heads)
    out = sequences.step(ranges, num_padding=3)[:-3].double()
    exact = rounded(sequences)
    wanted = torch.cat([exact[i][start:end] for i, start, end in ranges])
    # Weights sum up to one, and each is off by half a unit of eight bits at most.
    most = max(v.abs().max() for v in sequences.v).item()
    assert (out - wanted).abs().max() < 2**-9 * most
    assert (out - wanted).abs().mean() < 2**-11  # they go both ways


def test_the_first_token_gets_its_value_to_the_bit():
    sequences = Sequences([5], PairedBackend, BFLOAT16)
    out = sequences.step([(0, 0, 5)])
    values = sequences.v[0][:1].bfloat16().float().repeat_interleave(3, dim=1)
    assert torch.equal(out[:1], values)


@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_a_row_has_the_same_bits_in_any_batch_chunk_and_block(head_dim, num_threads):
    spec = dataclasses.replace(BFLOAT16, head_dim=head_dim)
    wanted = whole(PairedBackend, spec, LENGTHS)
    for block_size in (1, 3, 32, 256):
        found = whole(PairedBackend, spec, LENGTHS, block_size=block_size)
        assert all(map(torch.equal, found, wanted))
    for cuts in ([*range(20), *range(255, 270)], [*range(0, 270, 3)], [*range(0, 270, 33)], [256]):
        sequences = Sequences(LENGTHS, PairedBackend, spec)
        for i in range(len(LENGTHS)):
            assert torch.equal(in_parts(sequences, i, cuts), wanted[i]), f"request {i}, {cuts[:3]}"


@pytest.mark.parametrize("position", [4, 5, 38])
def test_a_token_that_is_not_a_number_spoils_none_before_it(position):
    """Not even the one that shares its pair."""
    sequences = Sequences([40], PairedBackend, BFLOAT16)
    clean = sequences.step([(0, 0, 40)])
    for x in (sequences.k[0], sequences.v[0]):
        x[position] = float("nan")
    spoilt = sequences.step([(0, 0, 40)])
    assert torch.equal(spoilt[:position], clean[:position])
    assert spoilt[position:].isnan().all()


@pytest.mark.parametrize(
    ("cached", "multiplied", "has_units", "is_paired"),
    [
        ("bfloat16", torch.bfloat16, True, True),
        ("float32", torch.bfloat16, True, False),
        ("bfloat16", torch.float32, True, False),
        ("bfloat16", torch.bfloat16, False, False),
    ],
)
def test_a_model_of_bfloat16_gets_it_where_it_can_and_it_has_a_name_of_its_own(
    monkeypatch, cached, multiplied, has_units, is_paired
):
    monkeypatch.setattr(cpu_backend, "multiplies_bfloat16", lambda: has_units)
    layer = dataclasses.replace(BFLOAT16, dtype=cached)
    setup = AttentionSetup(16, layer, 6, torch.float32, torch.device("cpu"), multiplied=multiplied)
    backend = CpuBackend.for_model(setup)
    assert backend.numerics_name == ("cpu paired" if is_paired else "cpu")


def results() -> list[Tensor]:
    return whole(PairedBackend, BFLOAT16, LENGTHS)


@pytest.mark.slow
@needs_avx2
def test_a_cpu_without_such_units_computes_it_too():
    for ours, theirs in zip(results(), computed_with(AVX2, results), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.02)
