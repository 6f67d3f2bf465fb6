"""WeightStorage: as what the layers of a model get the weights that a source gives.

| quantization | linear layers | output layer | embedding |
|---|---|---|---|
| what a checkpoint holds | its floats and records | as they are | as it is |
| int8, int4, w8a8, w4a8 | quantised, unless they are already | int8 | float; int8 if tied |
| bfloat16 | rounded | rounded | rounded |

Norms and biases stay float32. The output layer is a fifth of a small model and decides between
neighbours: int8 costs it next to nothing, 4-bit weights and 8-bit activations do (docs/log.md). A
tied embedding is one table: the rows that are looked up are those that make the logits.

Records run on kernels of their own, in whatever arithmetic their scheme says. Where there are none
(no compiler, or a dtype that the native kernels do not serve) the same weights are kept as floats.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from nano.errors import ConfigError
from nano.layers.embedding import Embedding
from nano.layers.kernels import Kernels, TorchKernels
from nano.layers.linear import Linear
from nano.layers.native_kernels import NativeKernels
from nano.layers.packed_weight import PackedWeight
from nano.log import get_logger
from nano.quant.formats import SplitWeight, pack
from nano.quant.quantized_weight import QuantizedWeight
from nano.quant.records import Affine4, Record, Symmetric8
from nano.quant.schemes import SCHEMES, Scheme, quantize

logger = get_logger(__name__)

OnlineScheme = Scheme | Literal["bfloat16"]
Matrix = Tensor | Record

_OUTPUT_SCHEME: dict[OnlineScheme, OnlineScheme] = {
    "int8": "int8",
    "w8a8": "int8",
    "int4": "int8",
    "w4a8": "int8",
    "bfloat16": "bfloat16",
}
_ACTIVATION_SCHEMES = ("w8a8", "w4a8")
# Records of these kinds need no second rounding to be what the scheme asks for.
_KEPT_RECORDS: dict[OnlineScheme, type[Record]] = {
    "int8": Symmetric8,
    "int4": Affine4,
    "w4a8": Affine4,
}


class WeightStorage:
    """Decides, for each layer that a loader comes to, how its weights are kept; puts them there.

    One matrix at a time: what a layer has been given is packed for `kernels` at once.
    """

    def __init__(
        self,
        quantization: str | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ):
        """Raises `ConfigError` for a scheme that needs kernels where there are none."""
        self._scheme: OnlineScheme | None = None
        if quantization in (*SCHEMES, "bfloat16"):
            self._scheme = cast(OnlineScheme, quantization)
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        # torch's own kernels read plain parameters.
        self._packs_floats = type(kernels) is not TorchKernels
        self._is_native = isinstance(kernels, NativeKernels)
        if self._scheme in _ACTIVATION_SCHEMES and not self._is_native:
            raise ConfigError(
                f"quantization={quantization} rounds activations too, which only the native "
                "kernels do: they need a C++ compiler and a CPU in float32 or bfloat16. int8 and "
                "int4 do without"
            )

        if quantization not in (None, "bfloat16") and not self._is_native:
            logger.info(
                "quantized weights are kept as the floats they stand for: their kernels need a "
                "C++ compiler and a CPU in float32 or bfloat16"
            )

    def fill_linear(
        self, layer: Linear, shards: Sequence[Matrix], bias: Tensor | None, *, is_output: bool
    ) -> None:
        """shards: [N_i, K], whose outputs follow each other; bias: [N]."""
        scheme = self._scheme
        if is_output and scheme is not None:
            scheme = _OUTPUT_SCHEME[scheme]
        bias = None if bias is None else self._moved(bias)
        layer.packed = self._packed(shards, bias, scheme)
        if layer.packed is not None:
            layer.weight = layer.bias = None
            return
        layer.weight = self._fused(shards, scheme)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        if self._packs_floats:
            layer.pack(self._kernels)

    def fill_embedding(self, layer: Embedding, matrix: Matrix, *, is_tied: bool) -> None:
        """`is_tied`: it makes the logits too."""
        scheme = None
        if self._scheme is not None and (is_tied or self._scheme == "bfloat16"):
            scheme = _OUTPUT_SCHEME[self._scheme]
        packed = self._packed([matrix], None, scheme)
        if packed is not None:
            assert isinstance(packed, QuantizedWeight)
            layer.table = packed.as_table()
            layer.packed = packed if is_tied else None
            layer.weight = None
            return
        layer.weight = self._fused([matrix], scheme)
        if self._packs_floats:
            layer.pack(self._kernels, for_logits=is_tied)

    def parameter(self, tensor: Tensor) -> nn.Parameter:
        """A weight of a layer that has no matrix."""
        return nn.Parameter(self._moved(tensor), requires_grad=False)

    def _packed(
        self, shards: Sequence[Matrix], bias: Tensor | None, scheme: OnlineScheme | None
    ) -> PackedWeight | None:
        """The shards on kernels for records; None if they are to be floats."""
        if not self._is_native or scheme == "bfloat16":
            return None
        matrices = [_as_scheme(shard, scheme) for shard in shards]
        if all(isinstance(matrix, Tensor) for matrix in matrices):
            return None
        packed, start = [], 0
        for matrix in _joined(matrices):
            end = start + _num_outputs(matrix)
            part = None if bias is None else bias[start:end]
            if isinstance(matrix, Tensor):
                packed.append(pack(matrix.float(), part))
            else:
                packed.append(pack(matrix, part, scheme))
            start = end
        return packed[0] if len(packed) == 1 else SplitWeight(packed)

    def _fused(self, shards: Sequence[Matrix], scheme: OnlineScheme | None) -> nn.Parameter:
        """The shards as one float matrix of the values that `scheme` leaves."""
        floats = [_as_floats(_as_scheme(shard, scheme)) for shard in shards]
        dtype = self._dtype
        if self._is_native and all(x.dtype == torch.bfloat16 for x in floats):
            dtype = torch.bfloat16  # as which it will be packed: there is no need to widen it first
        num_outputs = sum(len(x) for x in floats)
        memory = torch.empty(num_outputs, floats[0].shape[1], dtype=dtype, device=self._device)
        torch.cat([x.to(dtype) for x in floats], out=memory)
        return nn.Parameter(memory, requires_grad=False)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype, copy=True)


def _as_scheme(matrix: Matrix, scheme: OnlineScheme | None) -> Matrix:
    """The matrix with the precision that the scheme leaves it."""
    if scheme is None:
        return matrix
    if scheme == "bfloat16":
        return _as_floats(matrix).to(torch.bfloat16)
    if isinstance(matrix, _KEPT_RECORDS.get(scheme, ())):
        return matrix
    return quantize(_as_floats(matrix).float(), scheme)


def _as_floats(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.dequantized()


def _joined(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Neighbours of one kind as one matrix: fewer, larger products."""
    joined = [matrices[0]]
    for matrix in matrices[1:]:
        both = _join(joined[-1], matrix)
        joined[-1:] = [joined[-1], matrix] if both is None else [both]
    return joined


def _join(first: Matrix, second: Matrix) -> Matrix | None:
    """One matrix of both's outputs; None if they differ in kind, group size or input order."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat([first.float(), second.float()])
    if isinstance(first, Affine4) and isinstance(second, Affine4):
        return first.joined(second)
    if isinstance(first, Symmetric8) and isinstance(second, Symmetric8):
        return first.joined(second)
    return None


def _num_outputs(matrix: Matrix) -> int:
    return len(matrix) if isinstance(matrix, Tensor) else len(matrix.q)
