"""select_kernels: which kernels a model's layers compute with, and why."""

from nano.errors import ConfigError
from nano.layers.kernels import Kernels, TorchKernels
from nano.layers.native_kernels import BFloat16Kernels, NativeKernels
from nano.layers.row_kernels import RowKernels
from nano.log import get_logger
from nano.native.build import multiplies_bfloat16

logger = get_logger(__name__)


def select_kernels(dtype: str, numerics: str, device: str = "cpu") -> Kernels:
    """The fastest kernels that keep what `numerics` promises, for a model that computes in `dtype`.

    "exact": a row's bits do not depend on its batch. "fast" gives that up where keeping it is slow.
    Raises `ConfigError` for bfloat16 on a CPU without our kernels.
    """
    if device != "cpu":
        logger.info("layers: torch's kernels on %s", device)
        return TorchKernels()
    if dtype == "bfloat16":
        if not BFloat16Kernels.is_available():
            raise ConfigError("dtype=bfloat16 on a CPU needs a C++ compiler; float32 does without")
        slow = " (in units for float32, which takes as long: this CPU has no others)"
        why = "" if multiplies_bfloat16() else slow
        logger.info("layers: native kernels, products of bfloat16 summed in float32%s", why)
        return BFloat16Kernels()
    if dtype == "float32" and NativeKernels.is_available():
        logger.info("layers: native kernels")
        return NativeKernels()
    if dtype == "float32" and numerics == "exact":
        logger.warning(
            "layers: torch's kernels, one row at a time: slow, but a row's bits do not depend on "
            "its batch (a C++ compiler gives both; numerics=fast gives up the second)"
        )
        return RowKernels()
    logger.info(
        "layers: torch's kernels in %s; the last bits of a row may depend on its batch", dtype
    )
    return TorchKernels()
