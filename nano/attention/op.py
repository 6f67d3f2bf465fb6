"""nano::attention: the one opaque op in a model, and the one ambient value it reads.

A compiled model is split at this op, so neither the KV cache nor the step's metadata is ever in a
graph: the op finds them in the forward context. It mutates only `out`, which the piece before it
allocates; an op that declared no mutation would be removed as dead code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What attention needs in one step: the planned backend, and each layer's cache."""

    backend: AttentionBackend
    kv_caches: list[Tensor]  # by layer_index


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the one that attention ops read. Refuses to nest."""
    global _current
    if _current is not None:
        raise RuntimeError("a forward pass is already running in this process")
    _current = context
    try:
        yield
    finally:
        _current = None


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer_index: int) -> None:
    """The body of nano::attention. Called as it is, it saves torch's way through the op: 4 us."""
    if _current is None:
        raise RuntimeError("nano::attention was called outside forward_context")
    _current.backend.forward(q, k, v, _current.kv_caches[layer_index], out)


# Library.define with a Python body costs 4 us a call; @custom_op costs 30 to 44.
_library = torch.library.Library("nano", "FRAGMENT")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer_index) -> ()")
_library.impl("attention", attend, "CPU")
_library.impl("attention", attend, "CUDA")
torch.library.register_fake("nano::attention", lambda q, k, v, out, layer_index: None, lib=_library)


def attention(q: Tensor, k: Tensor, v: Tensor, layer_index: int) -> Tensor:
    """Causal attention of this step's tokens over their requests' KV.

    q: [T, H, D]; k, v: [T, KVH, D], rotated, not yet cached. Returns [T, H, D].
    """
    out = torch.empty_like(q)
    if torch.compiler.is_compiling():
        torch.ops.nano.attention(q, k, v, out, layer_index)
    else:
        attend(q, k, v, out, layer_index)
    return out
