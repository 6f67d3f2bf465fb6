"""Rotary position embedding. T tokens, H heads, D head dim.

Dimension i is paired with i + D / 2 (the "rotate half" layout of Hugging Face checkpoints), and
pair i turns by position * inv_freq[i]. The kinds differ in inv_freq, and YaRN scales cos and sin.
"""

import math

import torch
from torch import Tensor, nn

from nano.checkpoint.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """cos and sin for a step's positions; made once per forward and shared by all layers.

    They are looked up in tables over all positions below `max_model_len`, which take 4 * D bytes a
    position in float32 (8192 positions of D = 64: 2 MB; 128k of D = 128: 67 MB). Computed in the
    model instead, they would differ by the last bit between one way of computing and another:
    torch's vector functions and its scalar ones, one thread and two, eager and compiled.
    """

    cos: Tensor  # [max_model_len, D / 2] in the model's dtype
    sin: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int, dtype: torch.dtype):
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        # Explicitly on the CPU: a model under construction may be on the meta device.
        inv_freq = inverse_frequencies(rope, head_dim, max_model_len, wide)
        positions = torch.arange(max_model_len, dtype=wide, device="cpu")
        # The angle is rounded as in Hugging Face; its functions are not: in float64 they are right
        # to the last bit of float32 however they are computed.
        angles = (positions[:, None] * inv_freq).double()
        scaling = attention_scaling(rope)
        self.register_buffer("cos", (angles.cos() * scaling).to(dtype), persistent=False)
        self.register_buffer("sin", (angles.sin() * scaling).to(dtype), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int -> cos, sin, each [T, 1, D / 2] in the model's dtype."""
        return self.cos[positions][:, None, :], self.sin[positions][:, None, :]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] turned by cos, sin [T, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention_scaling(rope: RopeConfig) -> float:
    """What multiplies cos and sin; q . k is scaled by its square. 1 except for YaRN."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(
            rope.factor, rope.mscale_all_dim
        )
    return _yarn_mscale(rope.factor, 1.0)


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_model_len: int, dtype: torch.dtype
) -> Tensor:
    """Radians per position of each pair, [D / 2] in `dtype`, on the CPU.

    `max_model_len` matters to "dynamic" only: beyond the trained length one base, that of the
    whole context, serves every position, because cached keys cannot be turned again.
    """
    theta = rope.theta
    if rope.kind == "dynamic":
        theta = _dynamic_theta(rope, head_dim, max_model_len)
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device="cpu") / head_dim
    inv_freq = 1.0 / theta**exponents
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    elif rope.kind == "yarn":
        inv_freq = _yarn(rope, inv_freq, head_dim)
    if rope.freq_factors is not None:
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=dtype, device="cpu")
    return inv_freq


def _dynamic_theta(rope: RopeConfig, head_dim: int, max_model_len: int) -> float:
    """NTK-aware base: slow pairs stretch to the longer context, fast pairs hardly change."""
    trained = rope.original_max_position
    growth = max(max_model_len, trained) / trained
    stretch = rope.factor * growth - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (head_dim / (head_dim - 2)))


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Slow pairs divided by the factor, fast ones kept, those between blended linearly in 1 /
    wavelength."""
    turns = rope.original_max_position * inv_freq / (2.0 * math.pi)  # over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / rope.factor


def _yarn(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn at least `beta_fast` times in the original context are kept, those under
    `beta_slow` divided by the factor, and a linear ramp over the pair index joins them."""
    low = _yarn_pair_index(rope, rope.beta_fast, head_dim)
    high = _yarn_pair_index(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001
    index = torch.arange(head_dim // 2, dtype=inv_freq.dtype, device="cpu")
    stretched = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return stretched * inv_freq / rope.factor + (1.0 - stretched) * inv_freq


def _yarn_pair_index(rope: RopeConfig, num_turns: float, head_dim: int) -> float:
    """The (fractional) pair that turns `num_turns` times over the original context."""
    wavelength = rope.original_max_position / num_turns
    return head_dim * math.log(wavelength / (2.0 * math.pi)) / (2.0 * math.log(rope.theta))


def _yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's fit of how much sharper attention must be over a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
