import dataclasses
import math
from typing import get_args

import msgspec
import pytest

from nano.engine.codec import GOODBYE, HELLO, KINDS, CodecError, decode, encode
from nano.engine.messages import (
    AbortRequests,
    AddRequests,
    ControlReply,
    ControlRequest,
    EngineFailure,
    EngineHeartbeat,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    FromCore,
    ToCore,
)
from nano.outputs import FinishReason, TokenOutput
from nano.sampling_params import SamplingParams
from nano.speculation import (
    DraftRecord,
    ProposerInfo,
    ProposerStats,
    RequestSpeculation,
    SpeculationStats,
)
from nano.step import TokenLogprobs

PARAMS = SamplingParams(
    n=2,
    temperature=0.5,
    top_p=0.75,
    top_k=7,
    min_p=0.125,
    presence_penalty=1.5,
    frequency_penalty=-1.5,
    repetition_penalty=1.25,
    logit_bias={3: -100.0, 70_000: 2.5},
    allowed_token_ids=(3, 4, 5),
    bad_words=("ham", "spam"),
    min_tokens=1,
    max_tokens=9,
    stop=("\n", "é"),
    stop_token_ids=(11, 12),
    include_stop_str_in_output=True,
    ignore_eos=True,
    seed=2**63 - 1,
    logprobs=2,
    prompt_logprobs=0,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    extra_args={"names": ["a", 1, 0.5], "deep": {"is": True, "not": None}},
)
REQUEST = EngineRequest(
    request_id="r/1",
    prompt_token_ids=[0, 1, 2**31 - 1],
    sampling_params=PARAMS,
    arrival_time=12.5,
    eos_token_ids=(1, 2),
    bad_words_token_ids=((5,), (6, 7)),
    priority=-3,
    cache_salt="salt",
    speculation=RequestSpeculation(("a", "b"), 3, False),
    prediction_token_ids=(5, 6),
    traces_drafts=True,
    deadline=14.5,
    queue_deadline=13.5,
)
STATS = SpeculationStats(3, 7, {"a": ProposerStats(2, 4, 3, [2, 2], [2, 1])})
LOGPROBS = TokenLogprobs(
    [[5, 5, 6], [7, 8, 9]], [[-0.5, -0.5, -math.inf], [-1.0, -2.0, -3.0]], [1, 4]
)
OUTPUT = TokenOutput(
    request_id="r/1",
    new_token_ids=[5, 7],
    finish_reason=FinishReason.ERROR,
    stop_token_id=7,
    logprobs=LOGPROBS,
    prompt_logprobs=LOGPROBS,
    num_cached_tokens=16,
    first_scheduled_time=13.5,
    error="why",
    draft=DraftRecord(9, "a", [5, 8], [5, 7]),
    speculation=STATS,
)
MESSAGES = [
    AddRequests([REQUEST]),
    AbortRequests(["a", "b"]),
    ControlRequest(4, "reset_prefix_cache"),
    EngineOutputs([OUTPUT]),
    ControlReply(4, {"num_running": 2.0}),
    EngineReady(
        1024, 100, 16, 512, "nano-0123", (ProposerInfo("a", 4, False, True, 0.5, True),), True, 4
    ),
    EngineHeartbeat(99.5, 0.25),
    EngineFailure("on fire"),
]


def test_the_examples_cover_every_message_and_set_every_field() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(ToCore | FromCore))
    for record in (PARAMS, REQUEST, OUTPUT, *MESSAGES):
        for field in dataclasses.fields(record):
            assert getattr(record, field.name) != field.default, f"{field.name} is at its default"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: ToCore | FromCore) -> None:
    assert decode(encode(message)) == message


def test_optional_fields_that_are_none_stay_none() -> None:
    request = EngineRequest("r", [1], SamplingParams(max_tokens=None), 0.0)
    for message in (AddRequests([request]), EngineOutputs([TokenOutput("r", [])])):
        assert decode(encode(message)) == message
    assert decode(encode(EngineHeartbeat(None, 0.5))) == EngineHeartbeat(None, 0.5)


def test_container_and_enum_types_are_restored_exactly() -> None:
    added = decode(encode(AddRequests([REQUEST])))
    assert isinstance(added, AddRequests)
    request = added.requests[0]
    assert type(request.sampling_params) is SamplingParams
    assert type(request.sampling_params.logit_bias) is dict
    assert all(type(key) is int for key in request.sampling_params.logit_bias)
    assert type(request.sampling_params.stop) is tuple
    assert type(request.eos_token_ids) is tuple
    assert all(type(word) is tuple for word in request.bad_words_token_ids)
    outputs = decode(encode(EngineOutputs([OUTPUT])))
    assert isinstance(outputs, EngineOutputs)
    assert outputs.outputs[0].finish_reason is FinishReason.ERROR


def test_a_field_of_another_version_is_refused() -> None:
    for kind, message in zip(KINDS, MESSAGES):
        fields = msgspec.to_builtins(message) | {"surprise": 1}
        with pytest.raises(CodecError, match="surprise"):
            decode(bytes([kind]) + msgspec.msgpack.encode(fields))


def test_an_unknown_field_deep_inside_is_refused() -> None:
    fields = msgspec.to_builtins(AddRequests([REQUEST]))
    fields["requests"][0]["sampling_params"]["surprise"] = 1
    with pytest.raises(CodecError, match="surprise"):
        decode(bytes([1]) + msgspec.msgpack.encode(fields))


def test_a_missing_field_is_refused() -> None:
    fields = msgspec.to_builtins(EngineOutputs([OUTPUT]))
    del fields["outputs"][0]["error"]
    with pytest.raises(CodecError, match="error"):
        decode(bytes([4]) + msgspec.msgpack.encode(fields))


def test_sampling_params_are_validated_again_on_arrival() -> None:
    fields = msgspec.to_builtins(AddRequests([REQUEST]))
    fields["requests"][0]["sampling_params"]["top_p"] = 7.0
    with pytest.raises(CodecError, match=r"top_p must be in \(0.0, 1.0\], got 7.0"):
        decode(bytes([1]) + msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xff\x80",
        b"\x01",
        b"\x01\xc1",
        b"\x01" + b"\x91" * 5000,
        b"\x03" + msgspec.msgpack.encode({"call_id": 1, "method": "rm -rf"}),
        b"\x02" + msgspec.msgpack.encode({"request_ids": "abc"}),
        encode(MESSAGES[0])[:-1],
        encode(MESSAGES[0]) + b"\x00",
        HELLO,
        GOODBYE,
    ],
)
def test_bytes_that_are_no_message_raise_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)
