"""What the model's files decide about an EngineConfig, each with a log line. Torch-free."""

import dataclasses
import os
from typing import Literal

from nano.checkpoint.hf_config import DecoderConfig, load_decoder_config
from nano.checkpoint.locate import locate_model
from nano.config import EngineConfig, ModelOptions, Quantization
from nano.errors import ConfigError
from nano.log import get_logger

logger = get_logger(__name__)

_CHECKPOINT_METHODS = ("awq", "gptq", "gguf")  # the others work on what has been loaded


def resolve(config: EngineConfig) -> EngineConfig:
    """Resolve what the model's files decide: its folder, context length, dtype, device, mode.

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
    is_cpu = config.device.kind in ("auto", "cpu")
    if is_cpu and model.dtype in ("bfloat16", "float16"):
        raise ConfigError(
            f"dtype={model.dtype} is not computed on CPU, which has no units for it here; "
            "use float32 (every bfloat16 and float16 weight is exact in it) or auto"
        )
    dtype = model.dtype
    if dtype == "auto" and not is_cpu:
        dtype = "bfloat16"
        logger.info("dtype: bfloat16 (auto on %s)", config.device.kind)
    if dtype == "auto":
        dtype = "float32"
        logger.info("dtype: float32 (auto on CPU; the checkpoint says %s)", decoder.dtype)
    quantization = _resolve_quantization(model, decoder)
    mode, graph_mode = config.compile.mode, config.compile.cudagraph_mode
    if is_cpu and graph_mode not in ("auto", "NONE"):
        raise ConfigError(f"cudagraph_mode={graph_mode} needs device=cuda: a CPU has no graphs")
    if not is_cpu and mode == "compiled":
        raise ConfigError(
            f"compile_mode=compiled is for device=cpu, not {config.device.kind}: compiled pieces "
            "are C++; on a GPU, graphs hold the eager model (cudagraph_mode)"
        )
    if mode == "auto" and not is_cpu:
        mode = "eager"
    if mode == "auto":
        mode = _default_compile_mode()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            path=str(folder),
            dtype=dtype,
            max_model_len=max_model_len,
            quantization=quantization,
        ),
        compile=dataclasses.replace(config.compile, mode=mode),
        device=dataclasses.replace(config.device, kind="cpu" if is_cpu else config.device.kind),
    )


def _default_compile_mode() -> Literal["auto", "eager", "compiled"]:
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
