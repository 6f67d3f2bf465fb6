"""Which attention backend serves a model here, and why."""

from pkgutil import resolve_name

import torch

from nano.attention.backend import AttentionBackend
from nano.attention.cpu_backend import CpuBackend
from nano.attention.exact_torch_backend import ExactTorchBackend
from nano.attention.reference_backend import ReferenceBackend
from nano.attention.torch_backend import TorchBackend
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec
from nano.log import get_logger

logger = get_logger(__name__)

_BY_NAME: dict[str, type[AttentionBackend]] = {
    "cpu": CpuBackend,
    "torch": TorchBackend,
    "reference": ReferenceBackend,
}
# Imported when they are considered, and not on a machine that never does.
_GPU_BACKENDS = {
    "flashinfer": "nano.attention.flashinfer_backend:FlashInferBackend",
    "triton": "nano.attention.triton_backend:TritonBackend",
}
_PREFERENCE = {"cpu": ("cpu", "torch"), "cuda": ("flashinfer", "triton", "torch")}


def select_backend(
    wanted: str, layers: list[LayerKVSpec], device: torch.device, numerics: str = "exact"
) -> type[AttentionBackend]:
    """The wanted backend, or with "auto" the first on this device that serves every layer.

    `numerics`, as in `ModelOptions`, decides on a CPU which of the two torch backends "torch" is.
    Raises `ConfigError`, with the reason of every backend that was considered.
    """
    candidates = _PREFERENCE[device.type] if wanted == "auto" else (wanted,)
    refusals: list[str] = []
    for name in candidates:
        backend = _load(name, device, numerics)
        reasons = {backend.unsupported_reason(layer, device) for layer in layers} - {None}
        if not reasons:
            why = "asked for" if wanted != "auto" else f"first choice on {device.type}"
            logger.info("attention backend: %s (%s)", backend.name, "; ".join(refusals) or why)
            return backend
        refusals.append(f"{name}: {'; '.join(sorted(str(reason) for reason in reasons))}")
    raise ConfigError(f"no attention backend serves this model: {' | '.join(refusals)}")


def _load(name: str, device: torch.device, numerics: str) -> type[AttentionBackend]:
    if name == "torch" and device.type == "cpu" and numerics == "exact":
        return ExactTorchBackend
    if name in _BY_NAME:
        return _BY_NAME[name]
    backend: type[AttentionBackend] = resolve_name(_GPU_BACKENDS[name])
    return backend
