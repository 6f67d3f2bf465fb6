"""EngineConfig: every option of the engine, frozen and strict. Torch-free.

Three ways in, one table: `LLM(model, max_num_seqs=8)`, `--max-num-seqs 8` and a TOML recipe's
`[scheduler] max_num_requests = 8` all set the same field. The first two carry vLLM's names, the
recipe carries ours. Unknown names are refused. "auto" and None are resolved once, by resolve.py
(what files tell) and by the worker (what must be measured), each with a log line saying why.
"""

import argparse
import dataclasses
import pkgutil
import tomllib
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nano.errors import ConfigError
from nano.spec.options import SpeculativeOptions

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
CompileMode = Literal["auto", "eager", "compiled"]
# vLLM's names.
GraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
# "fp8" is "fp8_e4m3", and that torch's float8_e4m3fn.
CacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"]
KVSplit = Literal["scheduler", "fixed", "none"]  # as `FlashInferBackend` explains them
Quantization = Literal["int8", "w8a8", "int4", "w4a8", "bfloat16", "awq", "gptq", "gguf"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    path: str = "demo"
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None
    seed: int = 0
    generation_config: Literal["auto", "vllm"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    quantization: Quantization | None = None
    numerics: Literal["exact", "fast"] = "exact"
    logits_processors: tuple[str | type, ...] = ()  # "module:Class", or in this process the class


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    block_size: int = 16
    dtype: CacheDtype = "auto"
    enable_prefix_caching: bool = True
    memory_fraction: float | None = None
    memory_bytes: int | None = None
    num_blocks: int | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    token_budget: int | None = None
    max_num_requests: int = 256
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    async_scheduling: bool | None = None  # None: on GPUs


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    backend: Literal["auto", "flashinfer", "triton", "cpu", "torch", "reference"] = "auto"
    kv_split: Literal["auto"] | KVSplit = "auto"


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    mode: CompileMode = "auto"
    startup: Literal["auto", "eager-first", "compiled-first"] = "auto"
    cudagraph_mode: Literal["auto"] | GraphMode = "auto"
    cudagraph_capture_sizes: tuple[int, ...] = ()  # none: a ladder, then what the load asks for


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    kind: str = "auto"  # as `make_device` takes it
    num_threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options, by the part of the engine that reads them."""

    model: ModelOptions = field(default_factory=ModelOptions)
    kv_cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    compile: CompileOptions = field(default_factory=CompileOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)

    def __post_init__(self) -> None:
        at_least = {
            "max_model_len": (self.model.max_model_len, 1),
            "max_logprobs": (self.model.max_logprobs, -1),
            "seed": (self.model.seed, 0),
            "block_size": (self.kv_cache.block_size, 1),
            "kv_cache_memory_bytes": (self.kv_cache.memory_bytes, 1),
            "num_gpu_blocks_override": (self.kv_cache.num_blocks, 1),
            "max_num_batched_tokens": (self.scheduler.token_budget, 1),
            "max_num_seqs": (self.scheduler.max_num_requests, 1),
            "long_prefill_token_threshold": (self.scheduler.long_prefill_token_threshold, 0),
            "threads": (self.device.num_threads, 1),
        }
        for name, (value, low) in at_least.items():
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")
        for size in self.compile.cudagraph_capture_sizes:
            if size < 1:
                raise ConfigError(f"cudagraph_capture_sizes must be at least 1, got {size}")
        fraction = self.kv_cache.memory_fraction
        if fraction is not None and not 0.0 < fraction <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {fraction}")

    @classmethod
    def from_args(cls, args: dict[str, Any]) -> "EngineConfig":
        """From keyword arguments under vLLM's names, as `LLM` takes them. None is the default."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in args.items():
            arg = ENGINE_ARGS.get(name)
            if arg is None:
                raise ConfigError(
                    f"unknown engine argument {name!r}; known: {', '.join(sorted(ENGINE_ARGS))}"
                )
            if value is None:
                continue
            section = sections.setdefault(arg.section, {})
            if section.setdefault(arg.field, value) != value:  # said twice, under an alias
                raise ConfigError(f"{name} {value!r} contradicts {section[arg.field]!r}")
        return cls.from_sections(sections)

    @classmethod
    def from_toml(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> "EngineConfig":
        """From a recipe; `overrides` are arguments under vLLM's names."""
        try:
            # TOML is UTF-8 whatever the locale says.
            sections = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the recipe {path}: {error}") from error
        for name, value in (overrides or {}).items():
            if value is not None:
                arg = ENGINE_ARGS[name]
                section = sections.setdefault(arg.section, {})
                if isinstance(section, dict):  # if not, it is refused below
                    section[arg.field] = value
        return cls.from_sections(sections)

    @classmethod
    def from_sections(cls, sections: dict[str, Any]) -> "EngineConfig":
        """From `{section: {field: value}}`; unknown sections, fields and types are refused."""
        known = get_type_hints(cls)  # section -> its class
        parts: dict[str, Any] = {}
        for section, values in sections.items():
            if section not in known:
                raise ConfigError(f"unknown section [{section}]; known: {', '.join(known)}")
            if not isinstance(values, dict):
                raise ConfigError(f"[{section}] must be a table of options, got {values!r}")
            if known[section] is SpeculativeOptions:  # which has vLLM's forms, not fields alone
                parts[section] = SpeculativeOptions.parse(values)
                continue
            hints = get_type_hints(known[section])
            for name, value in values.items():
                if name not in hints:
                    raise ConfigError(
                        f"unknown option {name!r} in [{section}]; known: {', '.join(hints)}"
                    )
                if not _fits(value, hints[name]):
                    raise ConfigError(
                        f"[{section}] {name} must be {_spell(hints[name])}, got {value!r}"
                    )
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            parts[section] = known[section](**fields)
        return cls(**parts)

    def to_sections(self) -> dict[str, Any]:
        """The inverse of `from_sections`; JSON-ready, without the unset. Classes become paths."""
        sections = {
            section: {name: value for name, value in part.items() if value is not None}
            for section, part in dataclasses.asdict(self).items()
        }
        listed = sections["model"]["logits_processors"]
        sections["model"]["logits_processors"] = [_import_path(named) for named in listed]
        return sections


def load_class(named: str | type) -> type[Any]:
    """The class at "module:Class" or "module.Class"; a class is itself. Raises `ConfigError`."""
    try:
        found = pkgutil.resolve_name(named) if isinstance(named, str) else named
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(f"logits_processors: cannot import {named!r}: {error!r}") from error
    if not isinstance(found, type):
        raise ConfigError(f"logits_processors: {named!r} is not a class")
    return found


def _import_path(named: str | type) -> str:
    """By which another process finds the class. Raises `ConfigError`."""
    if isinstance(named, str):
        return named
    path = f"{named.__module__}:{named.__qualname__}"
    if named.__module__ == "__main__" or "<locals>" in path or load_class(path) is not named:
        raise ConfigError(
            f"logits_processors: another process cannot import {path}; move it into a module"
        )
    return path


@dataclass(frozen=True)
class EngineArg:
    """One vLLM-named argument and the field it sets."""

    section: str
    field: str
    help: str
    type: Any = None  # of the flag; None: the field's own


ENGINE_ARGS: dict[str, EngineArg] = {
    "model": EngineArg(
        "model", "path", "'demo', a folder of safetensors, or a .gguf file (default: demo)"
    ),
    "tokenizer": EngineArg("model", "tokenizer", "folder of another tokenizer"),
    "dtype": EngineArg(
        "model", "dtype", "what the model computes in (auto: float32 on CPU, 16 bits on GPUs)"
    ),
    "max_model_len": EngineArg("model", "max_model_len", "longest prompt + output, in tokens"),
    "seed": EngineArg("model", "seed", "seeds requests that name none (library only)"),
    "generation_config": EngineArg(
        "model", "generation_config", "'auto': sampling defaults of the model; 'vllm': neutral ones"
    ),
    "load_format": EngineArg("model", "load_format", "'dummy' makes random weights"),
    "max_logprobs": EngineArg("model", "max_logprobs", "most logprobs a request may ask; -1: all"),
    "logprobs_mode": EngineArg(
        "model", "logprobs_mode", "log probabilities before or after the sampling parameters"
    ),
    "quantization": EngineArg(
        "model",
        "quantization",
        "how weights are stored: int8, w8a8, int4 (online), bfloat16 (rounded), or what the "
        "checkpoint holds",
    ),
    "numerics": EngineArg(
        "model",
        "numerics",
        "without a C++ compiler: exact (slow, batch-independent) or fast (torch's own kernels)",
    ),
    "logits_processors": EngineArg(
        "model", "logits_processors", "classes that edit logits: module:Class ..."
    ),
    "block_size": EngineArg("kv_cache", "block_size", "token slots per KV block"),
    "kv_cache_dtype": EngineArg(
        "kv_cache", "dtype", "what keys and values are stored as (auto: what the model computes in)"
    ),
    "enable_prefix_caching": EngineArg(
        "kv_cache", "enable_prefix_caching", "share the KV of equal prompt prefixes"
    ),
    "gpu_memory_utilization": EngineArg(
        "kv_cache",
        "memory_fraction",
        "share for KV of the memory that is left (CPU default 0.4, GPU 0.9)",
    ),
    "kv_cache_memory_bytes": EngineArg("kv_cache", "memory_bytes", "bytes for KV, exactly"),
    "num_gpu_blocks_override": EngineArg("kv_cache", "num_blocks", "number of KV blocks, exactly"),
    "max_num_batched_tokens": EngineArg(
        "scheduler", "token_budget", "most tokens per step; unset: measured, <= 0.5 s a step"
    ),
    "max_num_seqs": EngineArg("scheduler", "max_num_requests", "most requests running at once"),
    "scheduling_policy": EngineArg("scheduler", "policy", "order of waiting requests"),
    "long_prefill_token_threshold": EngineArg(
        "scheduler", "long_prefill_token_threshold", "most tokens of one prompt per step; 0: no cap"
    ),
    "prefill_chunk_size": EngineArg(
        "scheduler", "long_prefill_token_threshold", "alias of --long-prefill-token-threshold"
    ),
    "async_scheduling": EngineArg(
        "scheduler",
        "async_scheduling",
        "plan a step while the one before it is computed (default: on GPUs)",
    ),
    "attention_backend": EngineArg("attention", "backend", "which attention kernel"),
    "attention_kv_split": EngineArg(
        "attention",
        "kv_split",
        "how FlashInfer divides a request's KV: scheduler (auto; to fill the GPU), or alike in any "
        "batch: fixed (parts of 1,024 tokens; no full graphs) or none (slow if it is long)",
    ),
    "compile_mode": EngineArg("compile", "mode", "eager or compiled"),
    "startup": EngineArg(
        "compile",
        "startup",
        "eager-first serves at once and swaps compiled pieces in; compiled-first waits for them",
    ),
    "cudagraph_mode": EngineArg(
        "compile", "cudagraph_mode", "which steps a GPU replays as graphs (auto: all that can be)"
    ),
    "cudagraph_capture_sizes": EngineArg(
        "compile",
        "cudagraph_capture_sizes",
        "tokens of the steps that a GPU replays as graphs (unset: a ladder, then what pads least)",
    ),
    "speculative_config": EngineArg(
        "speculative",
        "speculative_config",
        "JSON: proposers of draft tokens, and how they are used (see README)",
        str,
    ),
    "speculative_model": EngineArg(
        "speculative", "speculative_model", "a draft model: a config with its other defaults", str
    ),
    "num_speculative_tokens": EngineArg(
        "speculative", "num_speculative_tokens", "most drafts per step of that model", int
    ),
    "device": EngineArg(
        "device",
        "kind",
        "auto (a GPU if there is one), cpu, cuda, cuda:1, or a UUID: GPU-..., MIG-...",
    ),
    "threads": EngineArg("device", "num_threads", "CPU threads of the engine"),
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Every entry of `ENGINE_ARGS` as a `--flag`, and `--config recipe.toml`."""
    group = parser.add_argument_group("engine")
    group.add_argument("--config", help="TOML recipe; flags override it")
    for name, arg in ENGINE_ARGS.items():
        hint = _field_type(arg)
        flag = "--" + name.replace("_", "-")
        kinds = _alternatives(hint)
        choices = [choice for kind in kinds for choice in get_args(kind)] or None
        if bool in kinds:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=arg.help)
        elif get_origin(hint) is tuple:
            is_number = get_args(hint)[0] is int
            kind, metavar = (int, "N") if is_number else (str, "PATH")
            group.add_argument(flag, nargs="+", type=kind, metavar=metavar, help=arg.help)
        elif choices:
            group.add_argument(flag, choices=choices, help=arg.help)
        else:
            scalar = next(kind for kind in kinds if kind is not types.NoneType)
            group.add_argument(flag, type=scalar, metavar=scalar.__name__.upper(), help=arg.help)


def config_from_arguments(namespace: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that parsed flags (and their recipe) describe."""
    args = {name: getattr(namespace, name) for name in ENGINE_ARGS}
    if namespace.config:
        return EngineConfig.from_toml(namespace.config, args)
    return EngineConfig.from_args(args)


def _field_type(arg: EngineArg) -> Any:
    if arg.type is not None:
        return arg.type
    return get_type_hints(get_type_hints(EngineConfig)[arg.section])[arg.field]


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, or the type alone."""
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _fits(value: object, hint: Any) -> bool:
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            if value in get_args(kind):
                return True
        elif get_origin(kind) is tuple:
            if isinstance(value, (list, tuple)):
                return all(_fits(item, get_args(kind)[0]) for item in value)
        elif kind is float:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return True
        elif kind is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return True
        elif isinstance(value, kind):
            return True
    return False


def _spell(hint: Any) -> str:
    names = []
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            names += [repr(choice) for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            names.append(f"a list of {_spell(get_args(kind)[0])}")
        elif kind is not types.NoneType:
            names.append("a number" if kind is float else kind.__name__)
    return " or ".join(names)
