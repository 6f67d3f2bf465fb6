"""speculative_config: vLLM's forms, checked to the last field."""

import pytest

from nano.errors import ConfigError
from nano.spec.options import ProposerOptions, SpeculativeOptions

parse = SpeculativeOptions.parse


def test_one_proposer_several_and_a_whole_with_proposers_are_read_alike():
    alone = parse('{"method": "ngram", "rejection_sample_method": "block"}')
    listed = parse([{"method": "ngram"}, {"method": "draft_model", "model": "small"}])
    whole = parse({"proposers": [{"method": "ngram"}], "rejection_sample_method": "block"})
    assert alone == whole
    assert [proposer.name for proposer in listed.proposers] == ["ngram", "draft_model"]
    assert parse(listed.to_json()) == listed


def test_vllms_words_are_understood():
    assert parse({"model": "ngram"}).proposers[0].method == "ngram"
    assert parse({"model": "some/draft"}).proposers[0].method == "draft_model"
    assert parse({"rejection_sample_method": "standard"}).rejection_sample_method == "residual"
    assert parse({"speculative_model": "[ngram]"}) == parse({"method": "ngram"})
    assert parse({"speculative_config": {"method": "suffix"}}) == parse({"method": "suffix"})


def test_a_prediction_can_always_be_used_and_keeps_what_was_told_of_it():
    methods = [p.method for p in parse({"method": "ngram"}).with_prediction().proposers]
    assert methods == ["prediction", "ngram"]
    told = parse([{"method": "prediction", "num_speculative_tokens": 3}])
    assert told.with_prediction() == told


SYNTHETIC = {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "not JSON"),
        (3, "object or a list"),
        ([1], "must be an object"),
        ({"proposers": 3}, "must be a list"),
        ({"num_speculative_tokens": 3}, "needs a method"),
        ({"method": "medusa"}, "method"),
        ({"method": "ngram", "prompt_lookup": 3}, "unknown field 'prompt_lookup'"),
        ({"method": "ngram", "num_speculative_tokens": 0.5}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 129}, r"in \[1, 128\], got 129"),
        ({"method": "ngram", "num_speculative_tokens": -1}, r"in \[1, 128\], got -1"),
        ({"method": "ngram", "prompt_lookup_min": 5}, r"prompt_lookup_max must be in \[5, 64\]"),
        ({"method": "ngram", "model": "x"}, "takes no model"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "suffix", "quantization": "int8"}, "nothing to quantize"),
        ([{"method": "ngram"}, {"method": "ngram"}], "two proposers are called 'ngram'"),
        ({"method": "ngram", "draft_length": "long"}, "draft_length"),
        (SYNTHETIC, "goes with one of"),
        ({"synthetic_acceptance_rates": [0.5]}, "goes with one of"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1.5]}, r"\[0, 1\]"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6]}, "cannot rise"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": ["a"]}, "synthetic_acceptance_rates"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.5}, "at least 1"),
        ({"speculative_config": {"method": "ngram"}, "speculative_model": "x"}, "left out"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        parse(given)


def test_names_tell_proposers_of_one_method_apart():
    long = {"method": "ngram", "name": "long", "prompt_lookup_max": 9}
    options = parse([{"method": "ngram"}, long])
    assert [proposer.name for proposer in options.proposers] == ["ngram", "long"]
    assert options.proposers[0] == ProposerOptions(method="ngram")
