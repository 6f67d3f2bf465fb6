"""Where a model's weights come from: a checkpoint's files, or a random generator.

Both give each weight by its Hugging Face name: floats as a tensor, a quantised matrix as a record.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nano.checkpoint.quantization_config import (
    AwqConfig,
    GgufConfig,
    GptqConfig,
    QuantizationConfig,
)
from nano.errors import CheckpointError
from nano.models.weight_files import TensorReader, WeightFiles
from nano.quant.awq import AWQ_PARTS, awq_record
from nano.quant.gguf import gguf_record, gguf_shape
from nano.quant.gptq import GPTQ_OPTIONAL_PARTS, GPTQ_PARTS, gptq_record
from nano.quant.records import Record

_FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Written by old exporters; computed from the config here.
_ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_TIED_OUTPUT = "lm_head.weight"
_QWEIGHT = ".qweight"
_DUMMY_STD = 0.02


class WeightSource(ABC):
    """Gives the weights of one model. `num_bytes` counts what has been read, as it was stored."""

    num_bytes: int

    @abstractmethod
    def check_names(self, shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> None:
        """Raises `CheckpointError` unless the source has just what a model of `shapes` needs."""

    @abstractmethod
    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | Record:
        """One of the names that were checked. Raises `CheckpointError` if it is no such weight."""


class RandomWeights(WeightSource):
    """Small weights from a fixed seed, the same on every device and in every dtype."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._generator = torch.Generator().manual_seed(0)

    def check_names(self, shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> None:
        pass

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        return torch.randn(shape, generator=self._generator) * _DUMMY_STD


class CheckpointWeights(WeightSource):
    """The tensors of a folder's safetensors files, decoded as its configuration says.

    In AWQ and GPTQ checkpoints `x.weight` is made of `x.qweight` and its companions wherever there
    is an `x.qweight`; in converted GGUF files it is one tensor of raw blocks.
    """

    def __init__(self, folder: Path, quantization: QuantizationConfig | None):
        self.num_bytes = 0
        self._folder = folder
        self._quantization = quantization
        self._reader = TensorReader()
        self._files = WeightFiles.find(folder).names
        self._quantized: set[str] = set()  # names without a suffix
        if isinstance(quantization, AwqConfig | GptqConfig):
            self._quantized = {
                name.removesuffix(_QWEIGHT) for name in self._files if name.endswith(_QWEIGHT)
            }

    def check_names(self, shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> None:
        found = self._weights()
        missing = [name for name in shapes if name not in found]
        if missing:
            raise CheckpointError(
                f"{self._folder} lacks {_list(missing)}, which its config.json implies"
            )
        unexpected = [
            name for name in found if name not in shapes and not self._is_ignored(name, is_tied)
        ]
        if unexpected:
            raise CheckpointError(
                f"{found[unexpected[0]]} holds {_list(unexpected)}, for which a model of its "
                "config.json has no place"
            )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | Record:
        module = name.removesuffix(".weight")
        if module in self._quantized:
            return self._int4_record(module, shape)
        tensor = self._tensor(name)
        if isinstance(self._quantization, GgufConfig) and name in self._quantization.tensor_types:
            return self._gguf_record(name, tensor, shape, self._quantization.tensor_types[name])
        if tensor.dtype not in _FLOAT_DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOAT_DTYPES)
            raise self._error(name, f"is {tensor.dtype}; nano loads {known}")
        if tensor.shape != shape:
            raise self._error(name, f"has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor

    def _int4_record(self, module: str, shape: tuple[int, ...]) -> Record:
        num_outputs, num_inputs = shape
        try:
            if isinstance(self._quantization, AwqConfig):
                parts = self._parts(module, AWQ_PARTS)
                return awq_record(parts, (num_outputs, num_inputs), self._quantization.group_size)
            assert isinstance(self._quantization, GptqConfig)
            parts = self._parts(module, GPTQ_PARTS, GPTQ_OPTIONAL_PARTS)
            return gptq_record(parts, (num_outputs, num_inputs), self._quantization)
        except CheckpointError as error:
            raise CheckpointError(f"{self._files[module + _QWEIGHT]}: {module}: {error}") from error

    def _gguf_record(
        self, name: str, blocks: Tensor, shape: tuple[int, ...], type_name: str
    ) -> Record:
        if blocks.dtype != torch.uint8 or gguf_shape(blocks.shape, type_name) != shape:
            found = f"{blocks.dtype} of shape {tuple(blocks.shape)}"
            raise self._error(name, f"is {found}, which is no {type_name} of {shape}")
        return gguf_record(blocks, type_name)

    def _parts(
        self, module: str, names: tuple[str, ...], optional: tuple[str, ...] = ()
    ) -> dict[str, Tensor]:
        absent = [name for name in names if f"{module}.{name}" not in self._files]
        if absent:
            raise CheckpointError(f"{_list(absent)} is absent")
        present = [name for name in optional if f"{module}.{name}" in self._files]
        return {name: self._tensor(f"{module}.{name}") for name in (*names, *present)}

    def _tensor(self, name: str) -> Tensor:
        tensor = self._reader.read(self._files[name], name)
        self.num_bytes += tensor.nbytes
        return tensor

    def _weights(self) -> dict[str, Path]:
        """Every weight and bias that the tensors make up, and a file that it is in."""
        weights = {}
        for name, file in self._files.items():
            module, _, part = name.rpartition(".")
            if module in self._quantized and part in (*GPTQ_PARTS, *GPTQ_OPTIONAL_PARTS):
                name = f"{module}.weight"
            weights[name] = file
        return weights

    def _is_ignored(self, name: str, is_tied: bool) -> bool:
        if name == _TIED_OUTPUT:
            return is_tied  # a tied model's output is its embedding, whatever a file may hold
        module, _, part = name.rpartition(".")
        if part == "bias" and module in self._quantized:
            # AutoGPTQ writes one for every module, of zeros where the model has none.
            return not self._tensor(name).any()
        return _ROTARY_BUFFER.fullmatch(name) is not None

    def _error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._files[name]}: {name} {what}")


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
