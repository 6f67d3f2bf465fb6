"""Frequencies against transformers' own functions, and what holds beyond them."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nano.checkpoint.rope_config import RopeConfig
from nano.layers.rotary import (
    RotaryEmbedding,
    apply_rotary,
    attention_scaling,
    inverse_frequencies,
)

HEAD_DIM, MAX_POSITION = 64, 512

CASES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
]


def rope_of(parameters: dict, theta: float = 10_000.0) -> RopeConfig:
    values = dict(parameters)
    original = values.pop("original_max_position_embeddings", MAX_POSITION)
    kind = values.pop("rope_type")
    return RopeConfig(kind=kind, theta=theta, original_max_position=original, **values)


@pytest.mark.parametrize("max_model_len", [64, 2048])
@pytest.mark.parametrize("parameters", CASES, ids=lambda p: p["rope_type"])
def test_frequencies_and_scaling_equal_transformers(parameters, max_model_len):
    config = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITION, rope_parameters=dict(parameters)
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=max_model_len)
    rope = rope_of(parameters)
    actual = inverse_frequencies(rope, HEAD_DIM, max_model_len, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert attention_scaling(rope) == pytest.approx(scaling, rel=1e-12)


def test_dynamic_rope_is_unscaled_up_to_the_trained_length():
    plain = rope_of({"rope_type": "default"})
    dynamic = rope_of({"rope_type": "dynamic", "factor": 2.0})
    at = {n: inverse_frequencies(dynamic, HEAD_DIM, n, torch.float32) for n in (100, 512, 513)}
    expected = inverse_frequencies(plain, HEAD_DIM, 512, torch.float32)
    assert torch.equal(at[100], expected)
    assert torch.equal(at[512], expected)
    assert (at[513][1:] < expected[1:]).all()


def test_freq_factors_divide_the_frequencies():
    factors = tuple(1.0 + i for i in range(HEAD_DIM // 2))
    plain = RopeConfig(kind="default", theta=1e4, original_max_position=512)
    divided = RopeConfig(kind="default", theta=1e4, original_max_position=512, freq_factors=factors)
    ratio = inverse_frequencies(plain, HEAD_DIM, 512, torch.float64) / inverse_frequencies(
        divided, HEAD_DIM, 512, torch.float64
    )
    torch.testing.assert_close(ratio, torch.tensor(factors, dtype=torch.float64))


def test_scores_depend_on_the_distance_between_positions_only():
    rotary = RotaryEmbedding(rope_of({"rope_type": "default"}), HEAD_DIM, 512, torch.float64)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, dtype=torch.float64).unbind(0)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        turned_q = apply_rotary(q, *rotary(torch.tensor([q_position])))
        turned_k = apply_rotary(k, *rotary(torch.tensor([k_position])))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(300, 288), score(12, 0))
    assert abs(score(300, 288) - score(300, 287)) > 1e-6


def test_positions_give_the_same_bits_alone_and_in_company():
    rotary = RotaryEmbedding(rope_of({"rope_type": "default"}), HEAD_DIM, 512, torch.float32)
    cos, sin = rotary(torch.arange(37))
    alone = [rotary(torch.tensor([position])) for position in range(37)]
    assert torch.equal(cos, torch.cat([c for c, _ in alone]))
    assert torch.equal(sin, torch.cat([s for _, s in alone]))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-11), (torch.bfloat16, 5e-3)]
)
def test_angles_are_computed_in_float32_or_in_the_models_wider_dtype(dtype, tolerance):
    rotary = RotaryEmbedding(rope_of({"rope_type": "default"}), HEAD_DIM, 8192, dtype)
    cos, sin = rotary(torch.tensor([8191]))
    assert cos.dtype == sin.dtype == dtype
    angles = [8191 / 10_000.0 ** (2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    for computed, function in ((cos, math.cos), (sin, math.sin)):
        exact = torch.tensor([function(angle) for angle in angles], dtype=torch.float64)
        torch.testing.assert_close(computed[0, 0].double(), exact, rtol=0, atol=tolerance)


def test_the_tables_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    tables = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        tables.append(RotaryEmbedding(rope_of(CASES[4]), HEAD_DIM, 5000, torch.float32))
    torch.set_num_threads(before)
    assert torch.equal(tables[0].cos, tables[1].cos)
    assert torch.equal(tables[0].sin, tables[1].sin)


def test_a_model_on_the_meta_device_has_real_tables():
    with torch.device("meta"):
        rotary = RotaryEmbedding(rope_of(CASES[4]), HEAD_DIM, 512, torch.float32)
    real = RotaryEmbedding(rope_of(CASES[4]), HEAD_DIM, 512, torch.float32)
    assert torch.equal(rotary.cos, real.cos)
