"""Limits: what this device's memory and multipliers give at best, measured here and now."""

from dataclasses import dataclass

import torch

from nano.gpu_check.clock import Clock, median_seconds

_NUM_RUNS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What steps are held against."""

    bytes_per_second: float  # read and written by a large copy
    flops_per_second: float  # of a large matrix product, a multiplication and an addition each


def measure_limits(
    device: torch.device,
    clock: Clock,
    dtype: torch.dtype,
    *,
    copied_bytes: int,
    matrix_size: int,
) -> Limits:
    """By a copy of `copied_bytes`, and a product of square matrices of `dtype`."""
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = median_seconds(clock, lambda: target.copy_(source), _NUM_RUNS)
    left = torch.randn(matrix_size, matrix_size, device=device).to(dtype)
    out = torch.empty_like(left)
    multiply_seconds = median_seconds(clock, lambda: torch.mm(left, left, out=out), _NUM_RUNS)
    return Limits(2 * copied_bytes / copy_seconds, 2 * matrix_size**3 / multiply_seconds)
