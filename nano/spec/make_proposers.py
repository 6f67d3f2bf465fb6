"""From options to proposers: beside `options.py` the one place that reads a method's name."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nano.config import ModelOptions
from nano.kv_spec import LayerKVSpec
from nano.spec.custom import CustomProposer
from nano.spec.draft_model import DraftModel
from nano.spec.ngram import NgramProposer
from nano.spec.options import ProposerOptions, Quantization
from nano.spec.prediction import PredictionProposer
from nano.spec.proposer import ModelProposer, TextProposer
from nano.spec.proposers import Proposers
from nano.spec.self_quant import SelfQuantized
from nano.spec.suffix import SuffixProposer

# Integer arithmetic: the least time per pass. Its rounding costs acceptance, and no token.
_SELF_QUANTIZATION: Quantization = "w4a8"


@dataclass(frozen=True, slots=True)
class NeededModel:
    """A model that a proposer runs, to be loaded beside the target."""

    options: ModelOptions
    shares_kv: bool  # it reads and writes the target's own KV


def needed_model(options: ProposerOptions, target: ModelOptions) -> NeededModel | None:
    """What must be loaded for a proposer; None if it only looks at text."""
    quantization = options.quantization
    if options.method == "draft_model":
        assert options.model is not None
        draft = ModelOptions(
            path=options.model,
            dtype=target.dtype,
            max_model_len=options.max_model_len,
            load_format=target.load_format,
            quantization=quantization,
            numerics=target.numerics,
        )
        return NeededModel(draft, shares_kv=False)
    if options.method == "self_quant":
        coarse = dataclasses.replace(target, quantization=quantization or _SELF_QUANTIZATION)
        return NeededModel(coarse, shares_kv=True)
    return None


def make_proposers(
    all_options: Sequence[ProposerOptions],
    kv_layers: Mapping[str, Sequence[LayerKVSpec]],
    *,
    vocab_size: int,
    block_size: int,
) -> Proposers:
    """kv_layers: of the models that have KV of their own, by proposer name.

    Raises `ConfigError` for a class of the user's that cannot be used.
    """
    text: dict[str, TextProposer] = {}
    models: dict[str, ModelProposer] = {}
    for options in all_options:
        name, lookahead = options.name, options.num_speculative_tokens
        match options.method:
            case "draft_model":
                models[name] = DraftModel(list(kv_layers[name]), lookahead, block_size)
            case "self_quant":
                models[name] = SelfQuantized(lookahead)
            case "ngram":
                text[name] = NgramProposer(options.prompt_lookup_min, options.prompt_lookup_max)
            case "suffix":
                text[name] = SuffixProposer(
                    max_tree_depth=options.suffix_decoding_max_tree_depth,
                    max_cached_requests=options.suffix_decoding_max_cached_requests,
                    max_spec_factor=options.suffix_decoding_max_spec_factor,
                    min_token_prob=options.suffix_decoding_min_token_prob,
                )
            case "prediction":
                text[name] = PredictionProposer()
            case "custom_class":
                assert options.model is not None
                text[name] = CustomProposer(options.model, options, vocab_size)
    return Proposers(text, models)
