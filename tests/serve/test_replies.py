import json
import math

import pytest

from nano.engine.tokenizer import Tokenizer
from nano.errors import RequestFailed
from nano.outputs import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput
from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.chat_reply import ChatReply
from nano.serve.openai.completion_body import CompletionBody
from nano.serve.openai.completion_reply import CompletionReply
from tests.tiny import write_tokenizer

HEAD = {"id": "x", "created": 0, "model": "m", "system_fingerprint": "f"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def position(*entries: tuple[str, float, int]) -> PositionLogprobs:
    return {ord(text): Logprob(logprob, rank, text) for text, logprob, rank in entries}


def output(completion: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", "p", [112], [completion], finished=True)


IMPOSSIBLE = CompletionOutput(
    index=0,
    text="a",
    token_ids=[97],
    logprobs=[position(("a", -0.0, 1), ("b", -math.inf, 2))],
    finish_reason=FinishReason.LENGTH,
)


def test_an_infinite_logprob_is_written_as_a_finite_one(tokenizer: Tokenizer) -> None:
    chat = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "p"}], "logprobs": True, "top_logprobs": 2}
    )
    completion = CompletionBody.model_validate({"prompt": "p", "logprobs": 1})
    for reply in (
        ChatReply(chat, tokenizer, HEAD),
        CompletionReply(completion, tokenizer, HEAD),
    ):
        body = json.dumps(reply.whole([output(IMPOSSIBLE)]), allow_nan=False)
        assert "-9999.0" in body


def test_top_logprobs_are_the_likeliest_with_or_without_the_chosen(tokenizer: Tokenizer) -> None:
    chosen = position(("z", -5.0, 9), ("a", -0.1, 1), ("b", -0.2, 2))
    completion = CompletionOutput(0, "z", [122], logprobs=[chosen], finish_reason=FinishReason.STOP)
    messages = [{"role": "user", "content": "p"}]
    chat = ChatBody.model_validate({"messages": messages, "logprobs": True, "top_logprobs": 2})
    reply = ChatReply(chat, tokenizer, HEAD).whole([output(completion)])
    entry = reply["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == "z"
    assert [top["token"] for top in entry["top_logprobs"]] == ["a", "b"]
    legacy = CompletionBody.model_validate({"prompt": "p", "logprobs": 2})
    reply = CompletionReply(legacy, tokenizer, HEAD).whole([output(completion)])
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.1, "b": -0.2, "z": -5.0}]


def test_of_tokens_that_look_alike_the_likeliest_is_shown(tokenizer: Tokenizer) -> None:
    alike = {200: Logprob(-3.0, 5, "�"), 201: Logprob(-1.0, 1, "�"), 97: Logprob(-2.0, 2, "a")}
    completion = CompletionOutput(0, "�", [200], logprobs=[alike], finish_reason=FinishReason.STOP)
    body = CompletionBody.model_validate({"prompt": "p", "logprobs": 2})
    reply = CompletionReply(body, tokenizer, HEAD).whole([output(completion)])
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"�": -1.0, "a": -2.0}]
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-3.0]


def test_an_output_with_an_error_fails_the_call(tokenizer: Tokenizer) -> None:
    failed = CompletionOutput(0, "", [], finish_reason=FinishReason.ERROR, error="NaN logits")
    body = CompletionBody.model_validate({"prompt": "p"})
    with pytest.raises(RequestFailed, match="NaN logits"):
        CompletionReply(body, tokenizer, HEAD).whole([output(failed)])
    with pytest.raises(RequestFailed, match="NaN logits"):
        list(CompletionReply(body, tokenizer, HEAD).news(0, output(failed)))


def test_a_bos_that_the_caller_did_not_write_takes_no_room(tokenizer: Tokenizer) -> None:
    scored = [None, position(("a", -1.0, 1))]
    completion = CompletionOutput(
        0, "b", [98], logprobs=[position(("b", -1.0, 1))], finish_reason=FinishReason.LENGTH
    )
    with_bos = RequestOutput(
        "r", "a", [256, 97], [completion], finished=True, prompt_logprobs=scored
    )
    body = CompletionBody.model_validate({"prompt": "a", "logprobs": 0, "echo": True})
    choice = CompletionReply(body, tokenizer, HEAD).whole([with_bos])["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
