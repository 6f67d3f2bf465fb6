import dataclasses
from pathlib import Path
from typing import Any

import pytest

from nano.checkpoint.hf_config import DecoderConfig, load_decoder_config
from nano.config import EngineConfig
from nano.engine.codec import decode, encode
from nano.engine.input_processor import InputProcessor, PreparedRequest
from nano.engine.messages import AddRequests
from nano.errors import ConfigError, InvalidRequest
from nano.sampling_params import SamplingParams
from nano.speculation import ProposerInfo, RequestSpeculation
from tests import tiny
from tests.vocabularies import (
    byte_tokenizer,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
)

MAX_MODEL_LEN = 32
PROPOSERS = (
    ProposerInfo("echo", 6, is_free=True, needs_prediction=True),
    ProposerInfo("fast", 4, is_free=True),
    ProposerInfo("slow", 8, is_free=False),
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny.make_checkpoint(folder)
    return load_decoder_config(folder)


@pytest.fixture
def processor(decoder: DecoderConfig) -> InputProcessor:
    return make_processor(decoder)


def make_processor(
    decoder: DecoderConfig,
    draws_random_seeds: bool = False,
    num_kv_slots: int = MAX_MODEL_LEN,
    proposers: tuple[ProposerInfo, ...] = (),
    **args: Any,
) -> InputProcessor:
    config = EngineConfig.from_args({"max_model_len": MAX_MODEL_LEN, **args})
    return InputProcessor(
        config,
        decoder,
        byte_tokenizer(),
        num_kv_slots=num_kv_slots,
        proposers=proposers,
        draws_random_seeds=draws_random_seeds,
    )


def speculate(
    decoder: DecoderConfig,
    proposers: tuple[ProposerInfo, ...] = PROPOSERS,
    params: SamplingParams | None = None,
    **wishes: Any,
) -> PreparedRequest:
    """A prompt with `speculative`, `prediction` or `speculative_trace`."""
    processor = make_processor(decoder, proposers=proposers)
    return processor.process("r", "abc", params or SamplingParams(), arrival_time=1.0, **wishes)


def prepare(
    processor: InputProcessor, prompt: Any = "abc", request_id: str = "r", **params: Any
) -> PreparedRequest:
    sampling_params = SamplingParams(**params)
    return processor.process(request_id, prompt, sampling_params, arrival_time=1.0)


def test_text_and_its_token_ids_make_the_same_engine_request(processor: InputProcessor) -> None:
    by_text = prepare(processor, "abc", seed=1)
    by_ids = prepare(processor, [97, 98, 99], seed=1)
    assert by_text.children == by_ids.children
    assert by_text.children[0].prompt_token_ids == [97, 98, 99]
    assert (by_text.prompt, by_ids.prompt) == ("abc", None)


def test_what_the_core_gets_is_resolved(decoder: DecoderConfig) -> None:
    prepared = make_processor(decoder, scheduling_policy="priority").process(
        "r",
        "abc",
        SamplingParams(max_tokens=None),
        arrival_time=2.5,
        priority=-3,
        cache_salt="tenant",
    )
    (child,) = prepared.children
    assert child.request_id == "r"
    assert child.sampling_params.max_tokens == MAX_MODEL_LEN - 3
    assert child.sampling_params.seed is not None
    assert (child.arrival_time, child.priority, child.cache_salt) == (2.5, -3, "tenant")


def test_end_of_sequence_ids_of_model_and_tokenizer_are_joined(decoder: DecoderConfig) -> None:
    other = dataclasses.replace(decoder, eos_token_ids=(tiny.IM_END_TOKEN_ID, 99_999))
    assert make_processor(other).eos_token_ids == (tiny.IM_END_TOKEN_ID, tiny.EOS_TOKEN_ID)
    assert make_processor(decoder).eos_token_ids == (tiny.EOS_TOKEN_ID,)


def test_n_completions_become_children_with_their_own_seeds(processor: InputProcessor) -> None:
    children = prepare(processor, n=3, seed=7, prompt_logprobs=1).children  # B063
    assert [child.request_id for child in children] == ["0_r", "1_r", "2_r"]
    assert [child.sampling_params.seed for child in children] == [7, 8, 9]
    assert {child.sampling_params.n for child in children} == {1}
    # The prompt is the same for all: its log probabilities are computed once.
    assert [child.sampling_params.prompt_logprobs for child in children] == [1, None, None]


def test_the_first_of_n_is_the_request_alone(processor: InputProcessor) -> None:  # B063
    alone = prepare(processor, seed=7).children[0]
    first = prepare(processor, seed=7, n=2).children[0]
    assert dataclasses.replace(first, request_id="r") == alone


def test_child_seeds_wrap_around(processor: InputProcessor) -> None:
    children = prepare(processor, n=2, seed=2**63 - 1).children
    assert [child.sampling_params.seed for child in children] == [2**63 - 1, 0]


def test_missing_seeds_repeat_with_the_engine_seed_and_differ_between_requests(
    decoder: DecoderConfig,
) -> None:
    def seeds(engine_seed: int) -> list[int | None]:
        processor = make_processor(decoder, seed=engine_seed)
        return [prepare(processor).sampling_params.seed for _ in range(3)]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6


def test_a_server_draws_missing_seeds_at_random(decoder: DecoderConfig) -> None:
    first, second = (
        prepare(make_processor(decoder, draws_random_seeds=True)).sampling_params.seed
        for _ in range(2)
    )
    assert first != second


def test_a_model_may_bring_its_sampling_defaults(decoder: DecoderConfig) -> None:
    own = dataclasses.replace(decoder, default_sampling={"temperature": 0.2, "top_k": 5})
    processor = make_processor(own)
    assert processor.default_sampling_params(top_k=9) == SamplingParams(temperature=0.2, top_k=9)
    prepared = processor.process("r", "a", arrival_time=0.0)
    assert prepared.sampling_params.temperature == 0.2
    neutral = make_processor(own, generation_config="vllm")
    assert neutral.default_sampling_params() == SamplingParams()


def test_impossible_defaults_of_a_model_are_refused_at_the_start(decoder: DecoderConfig) -> None:
    own = dataclasses.replace(decoder, default_sampling={"temperature": -1.0})
    with pytest.raises(ConfigError, match=r"generation_config.json: temperature must be in"):
        make_processor(own)


def test_the_longest_prompt_leaves_one_token_to_generate(processor: InputProcessor) -> None:
    prepared = prepare(processor, "x" * (MAX_MODEL_LEN - 1), max_tokens=None)
    assert prepared.sampling_params.max_tokens == 1
    with pytest.raises(InvalidRequest, match="prompt is 32 tokens long; at most 31 fit"):
        prepare(processor, "x" * MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least one token"),
        ([], "at least one token"),
        ([1, -1], r"token id -1, outside \[0, 260\)"),
        ([260], r"token id 260, outside \[0, 260\)"),
        ([1, "a"], "token ids, got 'a'"),
        ([True], "token ids, got True"),
        ([1.0], "token ids, got 1.0"),
        (b"abc", "got bytes"),
        (7, "got int"),
        (None, "got NoneType"),
        ("a\udfff", "lone surrogate"),
    ],
)
def test_a_prompt_that_is_none_is_refused(
    processor: InputProcessor, prompt: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        prepare(processor, prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(  # B061: what needs the model to be refused
    ("params", "message"),
    [
        ({"logit_bias": {260: 1.0}}, r"260, outside \[0, 260\)"),
        ({"allowed_token_ids": [1, 999]}, r"999, outside \[0, 260\)"),
        ({"stop_token_ids": [300]}, r"300, outside \[0, 260\)"),
        ({"logprobs": 21}, r"max_logprobs \(20\), got 21"),
        ({"logprobs": -1}, r"max_logprobs \(20\)"),
        ({"prompt_logprobs": 10**6}, r"max_logprobs \(20\), got 1000000"),
        ({"min_tokens": 30, "max_tokens": 40}, "min_tokens is 30; .* room for 29"),
        ({"min_tokens": 30, "max_tokens": None}, "min_tokens is 30; .* room for 29"),
    ],
)
def test_parameters_beyond_the_model_are_refused_by_name(
    processor: InputProcessor, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        prepare(processor, **params)
    assert caught.value.param in params
    assert prepare(processor).children  # the next request works


def test_min_tokens_beyond_the_kv_cache_are_refused(decoder: DecoderConfig) -> None:
    processor = make_processor(decoder, num_kv_slots=16)
    assert prepare(processor, min_tokens=13, max_tokens=20).children
    with pytest.raises(InvalidRequest, match=r"min_tokens is 14; .* room for 13 .*KV cache of 16"):
        prepare(processor, min_tokens=14, max_tokens=20)


def test_all_logprobs_need_an_engine_that_allows_them(decoder: DecoderConfig) -> None:
    unlimited = make_processor(decoder, max_logprobs=-1)
    assert prepare(unlimited, logprobs=-1).sampling_params.logprobs == -1
    assert prepare(unlimited, logprobs=260).sampling_params.logprobs == 260
    with pytest.raises(InvalidRequest, match=r"vocabulary's size \(260\), got 261"):
        prepare(unlimited, logprobs=261)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("priority", 1.5),
        ("priority", True),
        ("priority", 2**31),
        ("priority", 1),  # under "fcfs", which would ignore it
        ("request_id", ""),
        ("request_id", None),
    ],
)
def test_bad_envelope_fields_are_refused_by_name(
    processor: InputProcessor, field: str, value: Any
) -> None:
    arguments = {"request_id": "r", field: value}
    with pytest.raises(InvalidRequest, match=field) as caught:
        processor.process(prompt="a", arrival_time=0.0, **arguments)
    assert caught.value.param == field


def test_bad_words_are_refused_with_and_without_a_leading_space(
    processor: InputProcessor,
) -> None:  # B067
    both = (tuple(b"the"), tuple(b" the"))
    assert prepare(processor, bad_words=["the"]).children[0].bad_words_token_ids == both
    spaced = prepare(processor, bad_words=[" the", "the"]).children[0].bad_words_token_ids
    assert sorted(spaced) == sorted(both)
    assert prepare(processor, bad_words=[" "]).children[0].bad_words_token_ids == ((32,),)


def test_bad_words_of_a_sentencepiece_model_have_both_forms(decoder: DecoderConfig) -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    config = EngineConfig.from_args({"max_model_len": MAX_MODEL_LEN})
    bigger = dataclasses.replace(decoder, vocab_size=len(tokens))
    processor = InputProcessor(
        config, bigger, sentencepiece_tokenizer(), num_kv_slots=MAX_MODEL_LEN
    )
    (child,) = prepare(processor, bad_words=["the"]).children
    forms = [[tokens[i] for i in token_ids] for token_ids in child.bad_words_token_ids]
    assert forms == [["t", "he"], ["▁the"]]


def test_bad_words_of_smollm2_are_single_tokens(decoder: DecoderConfig) -> None:  # B067
    tokenizer = smollm2_tokenizer()
    config = EngineConfig.from_args({"max_model_len": MAX_MODEL_LEN})
    bigger = dataclasses.replace(decoder, vocab_size=tokenizer.vocab_size)
    (child,) = prepare(
        InputProcessor(config, bigger, tokenizer, num_kv_slots=64), bad_words=["the"]
    ).children
    texts = [[tokenizer.token_text(i) for i in ids] for ids in child.bad_words_token_ids]
    assert texts == [["the"], [" the"]]


def test_a_chat_text_gets_no_second_bos(processor: InputProcessor) -> None:
    prepared = processor.process(
        "r", "<s>hi", SamplingParams(), arrival_time=0.0, add_special_tokens=False
    )
    assert prepared.prompt_token_ids == [tiny.BOS_TOKEN_ID, *b"hi"]


def test_a_prompt_that_the_kv_cache_cannot_hold_is_refused_with_both_numbers(decoder) -> None:
    config = EngineConfig.from_args({"max_model_len": MAX_MODEL_LEN})
    processor = InputProcessor(config, decoder, byte_tokenizer(), num_kv_slots=20)
    assert prepare(processor, "x" * 19).prompt_token_ids
    with pytest.raises(InvalidRequest, match="20 tokens long; at most 19 fit into the KV cache"):
        prepare(processor, "x" * 20)


@pytest.mark.parametrize(
    ("wishes", "enabled", "num_tokens"),
    [
        ({}, True, {"fast": 4, "slow": 8}),
        ({"speculative": {}}, True, {"fast": 4, "slow": 8}),
        ({"speculative": {"method": None, "num_tokens": None}}, True, {"fast": 4, "slow": 8}),
        ({"speculative": {"enabled": False}}, False, {}),
        ({"speculative": {"enabled": False, "method": "slow"}}, False, {}),
        ({"speculative": {"method": "slow"}}, True, {"slow": 8}),
        ({"speculative": {"methods": ["slow", "fast", "slow"]}}, True, {"slow": 8, "fast": 4}),
        ({"speculative": {"num_tokens": 5}}, True, {"fast": 4, "slow": 5}),
        ({"speculative": {"method": "fast", "num_tokens": 0}}, True, {"fast": 0}),
        ({"speculative": RequestSpeculation(("fast",), 2)}, True, {"fast": 2}),
        ({"prediction": "x"}, True, {"echo": 6, "fast": 4, "slow": 8}),
        ({"prediction": ""}, True, {"fast": 4, "slow": 8}),
        ({"prediction": [5], "speculative": {"method": "echo"}}, True, {"echo": 6}),
        ({"prediction": [], "speculative": {"method": "echo"}}, True, {}),
        ({"prediction": "x", "speculative": {"method": "fast"}}, True, {"fast": 4}),
    ],
)
def test_what_is_in_force_is_the_engines_own_under_the_callers_wishes(
    decoder: DecoderConfig, wishes: dict[str, Any], enabled: bool, num_tokens: dict[str, int]
) -> None:
    report = speculate(decoder, **wishes).speculative
    assert report is not None
    assert report.enabled is enabled
    assert list(report.num_tokens.items()) == list(num_tokens.items())  # the order counts
    assert report.methods == tuple(num_tokens)
    assert report.prediction_methods == tuple(name for name in num_tokens if name == "echo")


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"speculative": "fast"}, "must be an object, got 'fast'"),
        ({"speculative": {"mode": 1}}, "has no field 'mode'"),
        ({"speculative": {"method": "fast", "methods": ["slow"]}}, "not both"),
        ({"speculative": {"method": "magic"}}, "no method 'magic'; it has echo, fast, slow"),
        ({"speculative": {"methods": []}}, "methods must not be empty"),
        ({"speculative": {"methods": "fast"}}, "methods must be a list of names"),
        ({"speculative": {"methods": [1]}}, "methods must be a list of names"),
        ({"speculative": {"num_tokens": -1}}, "at least 0, got -1"),
        ({"speculative": {"num_tokens": True}}, "num_tokens must be an integer .* got True"),
        ({"speculative": {"num_tokens": 9}}, "num_tokens must be at most 8, .* got 9"),
        (
            {"speculative": {"method": "fast", "num_tokens": 5}},
            "num_tokens must be at most 4, which is the most that fast may draft here, got 5",
        ),
        (
            {"speculative": {"num_tokens": 9, "enabled": False}},
            "num_tokens must be at most 8, .* got 9",
        ),
        ({"speculative": {"enabled": 1}}, "enabled must be true or false, got 1"),
        ({"prediction": 5}, "a string or a list of token ids, got int"),
        ({"prediction": {"type": "content"}}, "a string or a list of token ids, got dict"),
        ({"prediction": b"x"}, "got bytes"),
        ({"prediction": [1.5]}, "token ids, got 1.5"),
        ({"prediction": [260]}, r"prediction holds token id 260, outside \[0, 260\)"),
        ({"prediction": "\udfff"}, "prediction .*lone surrogate"),
        ({"speculative_trace": 1}, "must be true or false, got 1"),
        ({"speculative_trace": None}, "must be true or false, got None"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused_by_name(
    decoder: DecoderConfig, wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        speculate(decoder, **wishes)
    assert caught.value.param in wishes
    assert caught.value.param in str(caught.value)


def test_an_engine_without_proposers_refuses_methods_and_reports_only_if_asked(
    decoder: DecoderConfig,
) -> None:
    assert speculate(decoder, ()).speculative is None
    for wishes in (
        {"speculative": {"enabled": False}},
        {"speculative": {"num_tokens": 0}},
        {"prediction": "x"},
        {"speculative_trace": True},
    ):
        report = speculate(decoder, (), **wishes).speculative
        assert report is not None
        assert report.methods == ()
    with pytest.raises(InvalidRequest, match="no method 'fast'; it has none"):
        speculate(decoder, (), speculative={"method": "fast", "enabled": False})
    with pytest.raises(InvalidRequest, match=r"num_tokens must be at most 0, .* got 1"):
        speculate(decoder, (), speculative={"num_tokens": 1})


def test_what_the_core_must_know_of_speculation_survives_the_wire(decoder: DecoderConfig) -> None:
    prepared = speculate(
        decoder,
        params=SamplingParams(n=2),
        speculative={"methods": ["slow", "echo"], "num_tokens": 3},
        prediction="xyz",
        speculative_trace=True,
    )
    message = decode(encode(AddRequests(prepared.children)))
    assert isinstance(message, AddRequests)
    assert message.requests == prepared.children
    for child in message.requests:
        assert child.speculation == RequestSpeculation(("slow", "echo"), 3)
        assert child.prediction_token_ids == tuple(b"xyz")
        assert child.traces_drafts


def test_speculation_leaves_the_rest_of_a_request_alone(decoder: DecoderConfig) -> None:
    (plain,) = speculate(decoder).children
    (other,) = speculate(decoder, speculative={"method": "slow"}, prediction="xyz").children
    assert plain.speculation == RequestSpeculation()
    restored = dataclasses.replace(other, speculation=RequestSpeculation(), prediction_token_ids=())
    assert restored == plain


def test_a_predicted_text_is_a_fragment_without_bos(decoder: DecoderConfig) -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    tokenizer = sentencepiece_tokenizer()
    config = EngineConfig.from_args({"max_model_len": MAX_MODEL_LEN})
    bigger = dataclasses.replace(decoder, vocab_size=len(tokens))
    processor = InputProcessor(config, bigger, tokenizer, num_kv_slots=MAX_MODEL_LEN)
    prompt = [1]
    for text, pieces in (("the", ["t", "he"]), (" the", ["▁the"])):
        (child,) = processor.process("r", prompt, arrival_time=0.0, prediction=text).children
        assert [tokens[i] for i in child.prediction_token_ids] == pieces


def test_a_prediction_is_cut_at_the_longest_possible_answer(decoder: DecoderConfig) -> None:
    for prediction in ("x" * 1000, [120] * 1000, "x" * MAX_MODEL_LEN):
        (child,) = speculate(decoder, prediction=prediction).children
        assert child.prediction_token_ids == (120,) * MAX_MODEL_LEN


def test_drafts_are_traced_if_asked_or_if_a_stop_string_may_end_the_counting(
    decoder: DecoderConfig,
) -> None:
    stop = SamplingParams(stop=["x"])
    off = {"enabled": False}

    def traces(*args: Any, **wishes: Any) -> bool:
        return speculate(decoder, *args, **wishes).children[0].traces_drafts

    assert not traces()
    assert traces(speculative_trace=True)
    assert traces(params=stop)
    assert not traces(params=stop, speculative=off)
    assert not traces((), stop)
