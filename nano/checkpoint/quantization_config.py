"""How a checkpoint stores its matrices if not as floats: AWQ, GPTQ or GGUF blocks. Torch-free.

Which matrices are stored so is told by their tensors: whatever has a `.qweight` is quantised, the
rest is float. What nano would decode differently is refused by key and value, as in `hf_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from nano.checkpoint.json_fields import JsonFields

QUANTIZATION_KEY = "quantization_config"  # in config.json
# Beside config.json, from before it had that key: AutoGPTQ's and AutoAWQ's.
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")

# GGUF types that we have kernels for; the others are dequantised when a file is converted. Q5_0
# runs as 8-bit weights: llama.cpp falls back to it where rows are no multiple of 256, as in nearly
# all of Qwen2.5-0.5B.
GGUF_PACKED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")

_BITS = 4
_WHOLE_ROW = -1  # as a group size
_GROUP_MULTIPLE = 16  # of the inputs that share a scale: what the kernels read

# Three ways in which GPTQ files hold a zero point z of 0 .. 15 in four bits:
#   plain    z (gptq_v2)
#   less_one z - 1, each in its four bits (gptq)
#   borrowed z - 1, subtracted from whole words, so that a z of 0 borrows from its neighbour: what
#            GPTQModel makes of its zero points when it writes the old format
GptqZeros = Literal["plain", "less_one", "borrowed"]


@dataclass(frozen=True, kw_only=True)
class AwqConfig:
    """Groups of `group_size` inputs share a scale and a zero point; None: the whole row does."""

    method: ClassVar[Literal["awq"]] = "awq"
    group_size: int | None


@dataclass(frozen=True, kw_only=True)
class GptqConfig:
    """As `AwqConfig`, in GPTQ's layout. With `needs_g_idx` inputs are grouped by a table."""

    method: ClassVar[Literal["gptq"]] = "gptq"
    group_size: int | None
    zeros: GptqZeros
    needs_g_idx: bool


@dataclass(frozen=True, kw_only=True)
class GgufConfig:
    """`tensor_types` maps each tensor that holds raw blocks to one of `GGUF_PACKED_TYPES`."""

    method: ClassVar[Literal["gguf"]] = "gguf"
    tensor_types: Mapping[str, str]


QuantizationConfig = AwqConfig | GptqConfig | GgufConfig


def read_quantization_config(config: JsonFields) -> QuantizationConfig | None:
    """From config.json or a file beside it; None if the weights are floats.

    Raises `CheckpointError` for methods, versions and widths that nano does not read.
    """
    if config.get(QUANTIZATION_KEY) is not None:
        fields = config.section(QUANTIZATION_KEY)
        method = fields.text("quant_method").lower()
    else:
        file = _separate_file(config.file.parent)
        if file is None:
            return None
        fields = JsonFields.read(file)
        # Only AWQ's tools have written w_bit; either may have left the method out.
        default = "awq" if fields.get("w_bit") is not None else "gptq"
        method = fields.text("quant_method", default).lower()
    if method == AwqConfig.method:
        return _awq(fields)
    if method == GptqConfig.method:
        return _gptq(fields)
    if method == GgufConfig.method:
        return _gguf(fields)
    raise fields.error("quant_method", "nano reads awq, gptq and gguf")


def gguf_quantization(tensor_types: Mapping[str, str]) -> dict[str, object]:
    """What our conversion of a GGUF file puts under `QUANTIZATION_KEY`."""
    return {"quant_method": GgufConfig.method, "tensor_types": dict(tensor_types)}


def _separate_file(folder: Path) -> Path | None:
    return next((file for name in QUANTIZATION_FILES if (file := folder / name).exists()), None)


def _awq(fields: JsonFields) -> AwqConfig:
    _check_bits(fields, "w_bit" if fields.get("w_bit") is not None else "bits")
    for key in ("version", "format"):
        if fields.text(key, "gemm").lower() != "gemm":
            raise fields.error(key, "nano reads the layout gemm only")
    if fields.text("backend", "").lower() == "llm-awq":
        raise fields.error("backend", "its layout is not read, only AutoAWQ's gemm")
    key = "q_group_size" if fields.get("q_group_size") is not None else "group_size"
    return AwqConfig(group_size=_group_size(fields, key))


def _gptq(fields: JsonFields) -> GptqConfig:
    _check_bits(fields, "bits")
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.error("pack_dtype", "nano reads words of int32 only")
    key = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    kind = fields.text(key, "gptq").lower()
    if kind not in ("gptq", "gptq_v2"):
        raise fields.error(key, "nano reads gptq and gptq_v2")
    # Other widths or group sizes for some modules; "-:" leaves modules float, as their tensors say.
    if any(not rule.startswith("-:") for rule in fields.section("dynamic").values):
        raise fields.error("dynamic", "nano reads one width and group size for all modules")
    zeros: GptqZeros = "less_one"
    if kind == "gptq_v2":
        zeros = "plain"
    elif _is_from_gptqmodel(fields):
        zeros = "borrowed"
    return GptqConfig(
        group_size=_group_size(fields, "group_size"),
        zeros=zeros,
        needs_g_idx=fields.boolean("desc_act", False),
    )


def _is_from_gptqmodel(fields: JsonFields) -> bool:
    quantizer = fields.section("meta").get("quantizer")
    tools = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(str(tool).startswith("gptqmodel") for tool in tools)


def _gguf(fields: JsonFields) -> GgufConfig:
    types = fields.section("tensor_types").values
    for kind in types.values():
        if kind not in GGUF_PACKED_TYPES:
            raise fields.error(
                "tensor_types", f"{kind!r} is none of {', '.join(GGUF_PACKED_TYPES)}"
            )
    return GgufConfig(tensor_types=types)


def _check_bits(fields: JsonFields, key: str) -> None:
    if fields.integer(key) != _BITS:
        raise fields.error(key, f"nano reads {_BITS}-bit weights")


def _group_size(fields: JsonFields, key: str) -> int | None:
    size = fields.integer(key, low=_WHOLE_ROW)
    if size == _WHOLE_ROW:
        return None
    if size < 1 or size % _GROUP_MULTIPLE:
        raise fields.error(key, f"it must be -1 or a multiple of {_GROUP_MULTIPLE}")
    return size
