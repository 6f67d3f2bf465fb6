"""FlashInfer's model behind operators, so that recorded graphs hold what it launches."""

from typing import Any

import torch
from torch import Tensor

from tests.attention.flashinfer_model import DecodeWrapper, ModelRuntime, PrefillWrapper

_library = torch.library.Library("nano_tests", "FRAGMENT")
_library.define(
    "append(Tensor k, Tensor v, Tensor owners, Tensor positions, Tensor(a!) cache, "
    "Tensor[] pages, str layout, int runtime) -> ()"
)
_library.define(
    "attend(Tensor q, Tensor cache, Tensor(a!) out, Tensor[] buffers, int runtime, int wrapper) "
    "-> ()"
)
_runtimes: list["LaunchingRuntime"] = []  # an operator takes numbers


class LaunchingRuntime(ModelRuntime):
    """As `ModelRuntime`. A kernel finds what it reads where it lay when it was launched first."""

    def __init__(self, capability: tuple[int, int] = (9, 0)):
        super().__init__(capability)
        self.number = len(_runtimes)
        _runtimes.append(self)
        self.flashinfer.BatchPrefillWithPagedKVCacheWrapper = self._prefill
        self.flashinfer.BatchDecodeWithPagedKVCacheWrapper = self._decode
        self.flashinfer.append_paged_kv_cache = self._append

    @property
    def decoding(self) -> list[DecodeWrapper]:
        return [wrapper for wrapper in self.wrappers if isinstance(wrapper, DecodeWrapper)]

    def _append(self, k: Tensor, v: Tensor, owners: Tensor, positions: Tensor, *rest: Any) -> None:
        cache, *pages, layout = rest
        torch.ops.nano_tests.append(k, v, owners, positions, cache, pages, layout, self.number)

    def _prefill(self, *args: Any, **options: Any) -> PrefillWrapper:
        return _launching(PrefillWrapper(self, *args, **options))

    def _decode(self, *args: Any, **options: Any) -> DecodeWrapper:
        return _launching(DecodeWrapper(self, *args, **options))


def _launching(wrapper: Any) -> Any:
    runtime, index = wrapper.runtime, wrapper.runtime.wrappers.index(wrapper)

    def run(q: Tensor, cache: Tensor, *, out: Tensor) -> None:
        buffers = list(getattr(wrapper, "buffers", ()))
        torch.ops.nano_tests.attend(q, cache, out, buffers, runtime.number, index)

    wrapper.launch, wrapper.run = wrapper.run, run
    return wrapper


def _append(k, v, owners, positions, cache, pages, layout, runtime):
    _runtimes[runtime].append_paged_kv_cache(k, v, owners, positions, cache, *pages, layout)


def _attend(q, cache, out, buffers, runtime, wrapper):
    _runtimes[runtime].wrappers[wrapper].launch(q, cache, out=out)


_library.impl("append", _append, "CPU")
_library.impl("attend", _attend, "CPU")
