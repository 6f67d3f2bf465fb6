"""SpeculativeOptions: the engine's speculation, from vLLM's `speculative_config`. Torch-free.

Beside `proposer.py` the only file that knows the methods by name.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args, get_type_hints

from nano.errors import ConfigError

Method = Literal["ngram", "suffix", "draft_model", "self_quant", "prediction", "custom_class"]
Quantization = Literal["int8", "w8a8", "int4", "w4a8", "bfloat16"]
AcceptanceRule = Literal["match", "residual", "block", "synthetic"]
DraftLength = Literal["auto", "static"]

MAX_DRAFT_TOKENS = 128
_ALIASES = {"standard": "residual"}  # as vLLM calls it
_TOP_LEVEL = (
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "draft_length",
)
_DEFAULT_TOKENS = {"ngram": 5, "suffix": 16, "prediction": 16}  # guesses that cost nothing
_DEFAULT_MODEL_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class ProposerOptions:
    """One proposer, under the field names of vLLM's SpeculativeConfig.

    name                      how requests and metrics call it; the method unless given
    num_speculative_tokens    most drafts per request and step
    model                     draft_model: folder, GGUF file or "demo"; custom_class: "module:Class"
    quantization              of draft_model and self_quant, as the engine's own option
    max_model_len             draft_model: no drafts past this many tokens of a request
    prompt_lookup_min, _max   ngram: lengths of the looked-up ending
    suffix_decoding_*         suffix: depth of a match, past outputs kept, drafts per matched
                              token, least estimated probability of a draft
    """

    method: Method
    name: str = ""
    num_speculative_tokens: int = 0
    model: str | None = None
    quantization: Quantization | None = None
    max_model_len: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def custom(cls, name: str, import_path: str) -> "ProposerOptions":
        """A class of the user's, by "module:Class"."""
        return cls(method="custom_class", name=name, model=import_path)

    def __post_init__(self) -> None:
        default = _DEFAULT_TOKENS.get(self.method, _DEFAULT_MODEL_TOKENS)
        object.__setattr__(self, "name", self.name or self.method)
        object.__setattr__(self, "num_speculative_tokens", self.num_speculative_tokens or default)
        for name, low, high in (
            ("num_speculative_tokens", 1, MAX_DRAFT_TOKENS),
            ("prompt_lookup_min", 1, 64),
            ("prompt_lookup_max", self.prompt_lookup_min, 64),
            ("suffix_decoding_max_tree_depth", 1, 1024),
            ("suffix_decoding_max_cached_requests", 0, 10**9),
            ("suffix_decoding_max_spec_factor", 0.0, 1024.0),
            ("suffix_decoding_min_token_prob", 0.0, 1.0),
            ("max_model_len", 1, 2**31 - 1),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(
                    f"speculative_config: {name} must be in [{low}, {high}], got {value}"
                )
        needs_model = self.method in ("draft_model", "custom_class")
        if needs_model != (self.model is not None):
            raise ConfigError(
                f"speculative_config: method {self.method} "
                + ("needs a model" if needs_model else f"takes no model, got {self.model!r}")
            )
        if self.quantization is not None and self.method not in ("draft_model", "self_quant"):
            raise ConfigError(
                f"speculative_config: method {self.method} has nothing to quantize, "
                f"got quantization={self.quantization!r}"
            )


# What any model can be sped up with.
WITHOUT_A_SECOND_MODEL = (
    ProposerOptions(method="ngram"),
    ProposerOptions(method="suffix"),
    ProposerOptions(method="self_quant"),
)


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """All of an engine's proposers and how their drafts are judged.

    proposers                in order of preference; requests that bring a `prediction` are served
                             by one of that method even if none is listed
    rejection_sample_method  match (the same tokens as without), residual or block (the same
                             distribution, for drafts of models), synthetic (benchmarks only)
    synthetic_acceptance_rates   probability that the drafts up to each position are kept, or
    synthetic_acceptance_length  the mean number of tokens per step to aim at
    draft_length             auto: as many as pay, which may be none; static: always the most
    """

    proposers: tuple[ProposerOptions, ...] = ()
    rejection_sample_method: AcceptanceRule = "match"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    draft_length: DraftLength = "auto"

    def __post_init__(self) -> None:
        names = [proposer.name for proposer in self.proposers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"speculative_config: two proposers are called {name!r}")
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        is_synthetic = self.rejection_sample_method == "synthetic"
        if is_synthetic != ((rates is None) != (length is None)):
            raise ConfigError(
                "speculative_config: rejection_sample_method synthetic goes with one of "
                "synthetic_acceptance_rates and synthetic_acceptance_length, and they with it"
            )
        if rates is not None and not (rates and all(0.0 <= rate <= 1.0 for rate in rates)):
            raise ConfigError(
                f"speculative_config: synthetic_acceptance_rates must be in [0, 1], got {rates}"
            )
        if rates is not None and any(later > rate for rate, later in pairwise(rates)):
            raise ConfigError(
                "speculative_config: synthetic_acceptance_rates are of whole leading parts and "
                f"cannot rise, got {rates}"
            )
        if length is not None and length < 1.0:
            raise ConfigError(
                f"speculative_config: synthetic_acceptance_length must be at least 1, got {length}"
            )

    @classmethod
    def parse(cls, given: object) -> "SpeculativeOptions":
        """From JSON text, a mapping or a list of mappings. Raises `ConfigError`.

        A list, or `proposers` in a mapping, holds several proposers; a mapping with a `method`
        (or only a `model`: a draft model) is one, with the options of the whole beside its own.
        """
        if isinstance(given, SpeculativeOptions):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"speculative_config is not JSON: {error}") from error
        if isinstance(given, list):
            given = {"proposers": given}
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config must be an object or a list, got {given!r}")
        if given.keys() & {"speculative_config", "speculative_model"}:
            return cls.parse(_spelt_out(given))
        whole = {name: given[name] for name in _TOP_LEVEL if name in given}
        rest = {name: value for name, value in given.items() if name not in _TOP_LEVEL}
        listed = rest.pop("proposers", None)
        if listed is not None and not isinstance(listed, (list, tuple)):
            raise ConfigError(f"speculative_config: proposers must be a list, got {listed!r}")
        proposers = [*(listed or ())]
        if rest:
            proposers.append(rest)
        rule = whole.get("rejection_sample_method")
        if isinstance(rule, str):
            whole["rejection_sample_method"] = _ALIASES.get(rule, rule)
        if isinstance(whole.get("synthetic_acceptance_rates"), (list, tuple)):
            whole["synthetic_acceptance_rates"] = tuple(whole["synthetic_acceptance_rates"])
        _check_types(cls, whole)
        return cls(proposers=tuple(_parse_proposer(one) for one in proposers), **whole)

    def to_json(self) -> dict[str, Any]:
        """The inverse of `parse`."""
        return dataclasses.asdict(self)

    def with_prediction(self) -> "SpeculativeOptions":
        """With a proposer for requests that bring a prediction, if none is listed: it comes first,
        since nobody guesses better than who asks."""
        if any(proposer.method == "prediction" for proposer in self.proposers):
            return self
        own = ProposerOptions(method="prediction")
        return dataclasses.replace(self, proposers=(own, *self.proposers))


def _spelt_out(given: Mapping[str, Any]) -> object:
    """What engine arguments stand for: vLLM's `speculative_config`, or those of its first version,
    `speculative_model` and `num_speculative_tokens`."""
    rest = {name: value for name, value in given.items() if name != "speculative_config"}
    if "speculative_config" not in given:
        return {"model": rest.pop("speculative_model"), **rest}
    if rest:
        raise ConfigError(
            f"speculative_config says it all: {', '.join(rest)} beside it must be left out"
        )
    return given["speculative_config"]


def _parse_proposer(given: object) -> ProposerOptions:
    if isinstance(given, ProposerOptions):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config: a proposer must be an object, got {given!r}")
    values = {name: value for name, value in given.items() if value is not None}
    if "method" not in values and "model" in values:
        model = values["model"]  # as vLLM reads it: the model's name may be a method's
        values["method"] = model if model in ("ngram", "[ngram]", "suffix") else "draft_model"
        if values["method"] != "draft_model":
            values["method"] = values["method"].strip("[]")
            del values["model"]
    if "method" not in values:
        raise ConfigError(f"speculative_config: a proposer needs a method, got {given!r}")
    _check_types(ProposerOptions, values)
    return ProposerOptions(**values)


def _check_types(kind: type, values: Mapping[str, Any]) -> None:
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(
                f"speculative_config: unknown field {name!r}; known: "
                f"{', '.join([*get_type_hints(ProposerOptions), *_TOP_LEVEL])}"
            )
        if not _fits(value, hints[name]):
            raise ConfigError(f"speculative_config: {name} must not be {value!r}")


def _fits(value: object, hint: Any) -> bool:
    if isinstance(value, bool):
        return False
    for kind in get_args(hint) or (hint,):
        if isinstance(kind, str):  # of a Literal
            if value == kind:
                return True
        elif get_args(kind):
            if _fits(value, kind) if get_args(kind)[0] is not float else _are_numbers(value):
                return True
        elif isinstance(value, (int, float) if kind is float else kind):
            return True
    return False


def _are_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(item, (int, float)) and not isinstance(item, bool) for item in value
    )
