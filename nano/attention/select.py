"""Which attention backend serves a model here, and why."""

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

# What an option names, by numerics: with a fixed order of every sum, or with torch's fastest.
_EXACT: dict[str, type[AttentionBackend]] = {
    "cpu": CpuBackend,
    "torch": ExactTorchBackend,
    "reference": ReferenceBackend,
}
_BY_NAME = {"exact": _EXACT, "fast": _EXACT | {"torch": TorchBackend}}
_PREFERENCE = {"cpu": ("cpu", "torch")}


def select_backend(
    wanted: str, layers: list[LayerKVSpec], device: torch.device, numerics: str = "exact"
) -> type[AttentionBackend]:
    """The wanted backend, or with "auto" the first on this device that serves every layer.

    `numerics`, as in `ModelOptions`, decides which of the two torch backends "torch" is.
    """
    candidates = _PREFERENCE[device.type] if wanted == "auto" else (wanted,)
    refusals: list[str] = []
    for name in candidates:
        backend = _BY_NAME[numerics][name]
        reasons = {backend.unsupported_reason(layer, device) for layer in layers} - {None}
        if not reasons:
            why = "asked for" if wanted != "auto" else f"first choice on {device.type}"
            logger.info("attention backend: %s (%s)", backend.name, "; ".join(refusals) or why)
            return backend
        refusals.append(f"{name}: {'; '.join(sorted(str(reason) for reason in reasons))}")
    raise ConfigError(f"no attention backend serves this model: {' | '.join(refusals)}")
