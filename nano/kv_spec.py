"""What a KV block holds and weighs: read by control plane, backends, proposers. Torch-free."""

from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """Keys and values of one attention layer. A draft model's layers live in the same blocks."""

    name: str
    num_kv_heads: int
    head_dim: int
    dtype: str
    role: Literal["target", "draft"] = "target"

    def bytes_per_block(self, block_size: int) -> int:
        return 2 * block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The pool: `num_blocks` blocks of `block_size` token slots, each spanning all `layers`."""

    block_size: int
    num_blocks: int
    layers: tuple[LayerKVSpec, ...]

    @property
    def bytes_per_block(self) -> int:
        return sum(layer.bytes_per_block(self.block_size) for layer in self.layers)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size
