"""What files and the machine decide about an EngineConfig, each with a log line. Torch-free."""

import dataclasses
import os
from collections.abc import Callable
from typing import Literal

from nano.checkpoint.hf_config import DecoderConfig, load_decoder_config
from nano.checkpoint.locate import locate_model
from nano.config import CompileMode, CompileOptions, EngineConfig, ModelOptions, Quantization
from nano.errors import ConfigError
from nano.gpus import Gpu, Gpus, find_gpus
from nano.log import get_logger

logger = get_logger(__name__)

_CHECKPOINT_METHODS = ("awq", "gptq", "gguf")  # the others work on what has been loaded
_OLDEST_USABLE = (7, 5)  # compute capability; what torch is built for today begins there
_OLDEST_WITH_BFLOAT16 = (8, 0)


def resolve(config: EngineConfig, find: Callable[[str], Gpus] = find_gpus) -> EngineConfig:
    """Resolve what the model's files decide, and which device there is: folder, context length,
    device, dtype, mode, async scheduling. `find` is called as `find_gpus`, unless told "cpu".

    Raises `ConfigError` or `CheckpointError`. What must be measured (token budget, number of
    blocks) is still None afterwards; the worker resolves it.
    """
    model = config.model
    folder = locate_model(model.path)
    decoder = load_decoder_config(folder)
    limit, reason = decoder.max_model_len, decoder.max_model_len_reason
    max_model_len = limit if model.max_model_len is None else model.max_model_len
    if max_model_len > limit and not decoder.can_extend_context:
        if decoder.sliding_window is None:
            raise ConfigError(f"max_model_len {max_model_len} is more than {limit} ({reason})")
        logger.info("max_model_len: %d is capped at %d (%s)", max_model_len, limit, reason)
        max_model_len = limit
    elif model.max_model_len is None:
        logger.info("max_model_len: %d (%s)", limit, reason)
    elif max_model_len > limit:
        logger.info(
            "max_model_len: %d exceeds the trained %d; every request is served with the one RoPE "
            "base of the longer length",
            max_model_len,
            limit,
        )
    device, gpu = _resolve_device(config.device.kind, find)
    is_cpu = device == "cpu"
    if is_cpu and model.dtype == "float16":
        raise ConfigError(
            "dtype=float16 is not computed on CPU, which has no units for it here; "
            "use float32 (every float16 weight is exact in it), bfloat16 or auto"
        )
    dtype = model.dtype
    if dtype == "auto":
        dtype, reason = _default_dtype(device, gpu)
        logger.info("dtype: %s (auto %s; the checkpoint says %s)", dtype, reason, decoder.dtype)
    quantization = _resolve_quantization(model, decoder)
    is_async = config.scheduler.async_scheduling
    if is_async is None:
        is_async = not is_cpu
        why = "its cores plan and compute" if is_cpu else "it computes while the host plans"
        logger.info("async scheduling: %s (auto on %s: %s)", "off" if is_cpu else "on", device, why)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            path=str(folder),
            dtype=dtype,
            max_model_len=max_model_len,
            quantization=quantization,
        ),
        compile=dataclasses.replace(config.compile, mode=_resolve_mode(config.compile, device)),
        scheduler=dataclasses.replace(config.scheduler, async_scheduling=is_async),
        device=dataclasses.replace(config.device, kind=device),
    )


def _resolve_device(wanted: str, find: Callable[[str], Gpus]) -> tuple[str, Gpu | None]:
    """(what `make_device` takes, the GPU of that name if there is one)."""
    if wanted == "cpu":
        return wanted, None
    if wanted != "auto":  # whether it can be had is for the worker to say, who asks torch
        return wanted, find(wanted).named(wanted)
    gpus = find("cuda")
    gpu = gpus.named("cuda")
    why = gpus.why_none or "no GPU is visible"
    if gpu is not None and gpu.capability >= _OLDEST_USABLE:
        logger.info("device: cuda (auto: there is a GPU, %s)", gpu.name)
        return "cuda", gpu
    if gpu is not None:
        why = f"{gpu.name} has {_spell(gpu.capability)}, and {_spell(_OLDEST_USABLE)} is needed"
    logger.info("device: cpu (auto: %s)", why)
    return "cpu", None


def _default_dtype(
    device: str, gpu: Gpu | None
) -> tuple[Literal["float32", "bfloat16", "float16"], str]:
    """What "auto" computes in, and why."""
    if device == "cpu":
        return "float32", "on CPU"
    if gpu is not None and gpu.capability < _OLDEST_WITH_BFLOAT16:
        return "float16", f"on {gpu.name}: {_spell(gpu.capability)} has no units for bfloat16"
    return "bfloat16", f"on {device}"


def _spell(capability: tuple[int, int]) -> str:
    return "compute capability " + ".".join(map(str, capability))


def _resolve_mode(options: CompileOptions, device: str) -> CompileMode:
    """The compile mode; raises `ConfigError` for what `device` has not."""
    if device != "cpu":
        if options.mode == "compiled":
            raise ConfigError(
                f"compile_mode=compiled is for device=cpu, not {device}: compiled pieces are C++; "
                "on a GPU, graphs hold the eager model (cudagraph_mode)"
            )
        return "eager"
    return _default_compile_mode() if options.mode == "auto" else options.mode


def _default_compile_mode() -> CompileMode:
    """What mode "auto" means: as NANO_COMPILE_MODE says (for debugging, and for tests, which would
    start many compilers), else the worker's choice, who knows the kernels."""
    told = os.environ.get("NANO_COMPILE_MODE", "auto")
    for mode in ("auto", "eager", "compiled"):
        if told == mode:
            return mode
    raise ConfigError(f"NANO_COMPILE_MODE must be auto, eager or compiled, got {told!r}")


def _resolve_quantization(model: ModelOptions, decoder: DecoderConfig) -> Quantization | None:
    """What the checkpoint's files hold, unless an online scheme is asked for on top of that."""
    stored = None if decoder.quantization is None else decoder.quantization.method
    asked = model.quantization
    if model.load_format == "dummy" and stored is not None:
        logger.info("load_format dummy makes float weights in place of the checkpoint's %s", stored)
        stored = None
    if asked is None:
        if stored is not None:
            logger.info("quantization: %s (what the checkpoint holds)", stored)
        return stored
    if asked in _CHECKPOINT_METHODS and asked != stored:
        raise ConfigError(
            f"quantization={asked}, but the weights of {model.path!r} are "
            f"{stored or 'floats'}; leave it out to load them as they are"
        )
    if stored in ("awq", "gptq") and asked in ("int8", "w8a8", "int4"):
        raise ConfigError(
            f"quantization={asked} would quantize a second time: the weights of {model.path!r} are "
            f"{stored} already; leave it out, or use bfloat16"
        )
    if asked == "bfloat16":
        logger.info("quantization: bfloat16 rounds every weight that does not fit it")
    return asked
