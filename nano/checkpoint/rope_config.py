"""RopeConfig: which rotary position embedding a checkpoint was trained with. Torch-free.

Three spellings are read, as Hugging Face reads them: `rope_scaling` with its kind under
`rope_type` or `type` beside a top-level `rope_theta`, and the newer `rope_parameters`, which
holds everything. GGUF files of Llama 3 carry their scaling as one divisor per frequency instead.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from nano.checkpoint.json_fields import JsonFields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

# Not a Hugging Face key: written by our GGUF conversion.
FREQ_FACTORS_KEY = "nano_rope_freq_factors"

DEFAULT_THETA = 10_000.0

_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KIND_KEYS: dict[RopeKind, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One kind of RoPE and its parameters; those of other kinds keep their defaults.

    `original_max_position` is the length before scaling, in tokens. `attention_factor` None means
    the kind's own formula. `freq_factors` divide the D / 2 frequencies, whatever the kind.
    """

    kind: RopeKind
    theta: float
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    def max_length(self, max_position_embeddings: int) -> tuple[int, str]:
        """Longest context in tokens, and the arithmetic behind it.

        YaRN checkpoints differ in whether `max_position_embeddings` already holds the scaled
        length, so theirs is counted from the original one.
        """
        trained = f"max_position_embeddings {max_position_embeddings}"
        if self.kind == "linear":
            length = int(max_position_embeddings * self.factor)
            return length, f"{trained} x linear RoPE factor {self.factor:g}"
        if self.kind == "yarn":
            original = self.original_max_position
            length = int(original * self.factor)
            return length, f"original length {original} x YaRN factor {self.factor:g}"
        if self.kind == "dynamic":
            return max_position_embeddings, f"{trained}, up to which dynamic RoPE is unscaled"
        return max_position_embeddings, trained


def read_rope_config(config: JsonFields, head_dim: int, max_position: int) -> RopeConfig:
    """From a config.json. Raises `CheckpointError` for kinds and keys that nano does not apply."""
    # Hugging Face's precedence: a non-empty rope_scaling hides rope_parameters.
    rope = config.section("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    kind_key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.text(kind_key, "default")
    if kind not in get_args(RopeKind):
        raise rope.error(kind_key, f"nano knows {', '.join(get_args(RopeKind))}")
    kind = cast(RopeKind, kind)
    rope.refuse_unknown(_COMMON_KEYS | _KIND_KEYS[kind])
    for fields in (config, rope):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "nano rotates whole heads only (1.0)")
    theta_source = rope if rope.get("rope_theta") is not None else config
    original = max_position
    if kind in ("llama3", "yarn"):
        top_level = config.get("original_max_position_embeddings") is not None
        original = (config if top_level else rope).integer(
            "original_max_position_embeddings", max_position
        )
    return RopeConfig(
        kind=kind,
        theta=theta_source.number("rope_theta", DEFAULT_THETA, low=1.0),
        original_max_position=original,
        freq_factors=_freq_factors(config, head_dim),
        **_kind_parameters(rope, kind),
    )


def _kind_parameters(rope: JsonFields, kind: RopeKind) -> dict[str, Any]:
    if kind == "default":
        return {}
    parameters: dict[str, Any] = {"factor": rope.number("factor", low=1.0)}
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not 0.0 < low < high:
            raise rope.error("low_freq_factor", f"it must be in (0, high_freq_factor {high:g})")
        parameters |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        # Hugging Face reads a zero beta as absent.
        parameters["beta_fast"] = rope.number("beta_fast", 32.0, low=0.0) or 32.0
        parameters["beta_slow"] = rope.number("beta_slow", 1.0, low=0.0) or 1.0
        parameters["truncate"] = rope.boolean("truncate", True)
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.get(key) is not None:
                parameters[key] = rope.number(key, low=0.0)
    return parameters


def _freq_factors(config: JsonFields, head_dim: int) -> tuple[float, ...] | None:
    factors = config.get(FREQ_FACTORS_KEY)
    if factors is None:
        return None
    is_valid = isinstance(factors, list) and all(
        isinstance(factor, float) and factor > 0.0 for factor in factors
    )
    if not is_valid or len(factors) != head_dim // 2:
        raise config.error(FREQ_FACTORS_KEY, f"it must hold {head_dim // 2} positive numbers")
    return tuple(factors)
