"""move_to_huge_pages: the weights of a model in one region of memory, in pages of 2 MB."""

from torch import nn

from nano.layers.packed_weight import PackedWeight
from nano.native.huge_pages import empty_bytes

_ALIGNMENT = 4096


def move_to_huge_pages(model: nn.Module) -> None:
    """Move the buffers of every `PackedWeight` in `model`, in the order of its modules.

    Where the system has no huge pages they are moved all the same, and nothing else changes.
    """
    places: list[tuple[nn.Module, str, int]] = []
    num_bytes = 0
    for module in model.modules():
        if isinstance(module, PackedWeight):
            for name, buffer in module.named_buffers(recurse=False):
                places.append((module, name, num_bytes))
                num_bytes += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not num_bytes:
        return
    memory = empty_bytes(num_bytes)
    for module, name, start in places:
        buffer = getattr(module, name)
        place = memory[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
        setattr(module, name, place.copy_(buffer))
