"""AWQ and GPTQ checkpoints from float ones, packed number by number as their tools publish it.

Beside each goes a float checkpoint of the dequantised weights, for transformers to run.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that a word's numbers belong to, lowest first
GPTQ_ORDER = tuple(range(8))


@dataclass(frozen=True)
class Grid:
    """A matrix in 4 bits: weight[k, n] = (q[k, n] - zeros[g, n]) * scales[g, n], g = groups[k]."""

    q: np.ndarray  # [K, N]
    zeros: np.ndarray  # [G, N]
    scales: np.ndarray  # [G, N] float16
    groups: np.ndarray  # [K]

    @classmethod
    def of(cls, weight: np.ndarray, groups: np.ndarray, is_symmetric: bool) -> "Grid":
        """weight: [N, K], as a Linear has it."""
        q = np.empty(weight.T.shape, dtype=np.int64)
        num_groups = int(groups.max()) + 1
        zeros = np.empty((num_groups, len(weight)), dtype=np.int64)
        scales = np.empty((num_groups, len(weight)), dtype=np.float16)
        for group in range(num_groups):
            values = weight.T[groups == group]  # [inputs of the group, N]
            low = np.minimum(values.min(axis=0), 0.0)
            high = np.maximum(values.max(axis=0), 0.0)
            if is_symmetric:
                high = np.maximum(-low, high)
                low = -high
            scales[group] = (high - low) / 15
            step = scales[group].astype(np.float32)
            zeros[group] = 8 if is_symmetric else np.clip(np.rint(-low / step), 0, 15)
            q[groups == group] = np.clip(np.rint(values / step) + zeros[group], 0, 15)
        return cls(q, zeros, scales, groups)

    def dequantized(self) -> np.ndarray:
        """[N, K] float32."""
        steps = self.scales.astype(np.float32)[self.groups]
        return ((self.q - self.zeros[self.groups]).astype(np.float32) * steps).T


def pack_columns(numbers: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """[R, C] of 0 .. 15 -> [R, C / 8] int32; word c holds the columns 8 c + order[i]."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for column in range(words.shape[1]):
        for i, place in enumerate(order):
            words[:, column] |= numbers[:, 8 * column + place].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def pack_rows(numbers: np.ndarray) -> np.ndarray:
    """[R, C] of 0 .. 15 -> [R / 8, C] int32; word r holds the rows 8 r + i."""
    return np.ascontiguousarray(pack_columns(np.ascontiguousarray(numbers.T), GPTQ_ORDER).T)


def borrow_one(words: np.ndarray) -> np.ndarray:
    """One less in each of a word's numbers, by one subtraction for all."""
    return (words.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)


def awq_tensors(grid: Grid) -> dict[str, np.ndarray]:
    return {
        "qweight": pack_columns(grid.q, AWQ_ORDER),
        "qzeros": pack_columns(grid.zeros, AWQ_ORDER),
        "scales": grid.scales,
    }


def gptq_tensors(grid: Grid, zeros: str = "less_one") -> dict[str, np.ndarray]:
    """`zeros`: plain (gptq_v2), less_one (gptq), or borrowed (gptq as GPTQModel writes it)."""
    qzeros = pack_columns(grid.zeros, GPTQ_ORDER)
    if zeros == "less_one":
        qzeros = pack_columns((grid.zeros - 1) & 15, GPTQ_ORDER)
    if zeros == "borrowed":
        qzeros = borrow_one(qzeros)
    return {
        "qweight": pack_rows(grid.q),
        "qzeros": qzeros,
        "scales": grid.scales,
        "g_idx": grid.groups.astype(np.int32),
    }


def in_order(num_inputs: int, group_size: int) -> np.ndarray:
    """The group of each input; -1 is one group for all."""
    size = num_inputs if group_size == -1 else group_size
    return np.arange(num_inputs) // size


def act_order(num_inputs: int, group_size: int, seed: int = 0) -> np.ndarray:
    """As `in_order` of inputs sorted by importance, which is made up."""
    importance = np.random.default_rng(seed).permutation(num_inputs)
    groups = np.empty(num_inputs, dtype=np.int64)
    groups[importance] = in_order(num_inputs, group_size)
    return groups


def write_int4(
    source: Path,
    folder: Path,
    quantization: dict[str, Any],
    tensors: Callable[[Grid], dict[str, np.ndarray]],
    *,
    groups: Callable[[int, int], np.ndarray] = in_order,
    is_symmetric: bool = False,
    modules: tuple[str, ...] = PROJECTIONS,
    config_file: str | None = None,
) -> Path:
    """Write `source` quantised to `folder`; returns the float checkpoint of the same weights.

    `modules` says what is quantised, by the last part of its name. `config_file` is where
    `quantization` goes; None is config.json.
    """
    reference = folder.with_name(folder.name + "-dequantized")
    shutil.copytree(source, folder)
    shutil.copytree(source, reference)
    group_size = quantization.get("group_size", quantization.get("q_group_size"))
    stored, dequantized = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in modules:
            grid = Grid.of(weight, groups(weight.shape[1], group_size), is_symmetric)
            stored |= {f"{module}.{part}": x for part, x in tensors(grid).items()}
            dequantized[name] = np.ascontiguousarray(grid.dequantized())
        else:
            stored[name] = dequantized[name] = weight
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(dequantized, reference / "model.safetensors", metadata={"format": "pt"})
    if config_file is None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
    else:
        (folder / config_file).write_text(json.dumps(quantization))
    return reference
