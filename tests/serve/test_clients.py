"""The official clients, sync and async, whole and streamed, against one real server."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI
from safetensors.torch import load_file, save_file

from tests.serve.scrape import wait_for
from tests.serve.server import Server
from tests.tiny import EOS_TOKEN_ID, make_checkpoint

MODEL = "tiny"
HELLO: Any = [{"role": "user", "content": "Hello"}]
DRAWN: Any = {"temperature": 1, "seed": 11}
CONTEXT = 4096  # tokens, of the strict server
NUM_AT_ONCE = 4  # requests that the server runs

CHAT: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12}
COMPLETION: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 12}
RESPONSE: Any = {"model": MODEL, "input": "Hello", "max_output_tokens": 12}
MESSAGE: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12}

LATE: Any = {"extra_body": {"temperature": 0, "timeout_ms": 1000}}

# What one call says: its text, why it ended, (input, output) tokens.
Said = tuple[str, str | None, tuple[int, int]]


@pytest.fixture(scope="module")
def tireless_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its likeliest token never ends an answer: the end's logit is 0, and others are above."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("serve") / "tireless", max_position_embeddings=32768
    )
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][EOS_TOKEN_ID] = 0
    save_file(weights, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def tireless(tireless_checkpoint: Path) -> Iterator[Server]:
    server = Server(tireless_checkpoint, "--max-num-seqs", str(NUM_AT_ONCE))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def strict(tireless_checkpoint: Path) -> Iterator[Server]:
    """It asks for a key, and has one place and one seat to wait for it."""
    server = Server(
        tireless_checkpoint,
        *("--api-key", "first", "second"),
        *("--max-num-seqs", "1", "--max-waiting-requests", "1"),
        *("--max-model-len", str(CONTEXT)),
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[Anthropic]:
    with theirs(server) as client:
        yield client


def ours(server: Server, key: str = "none", timeout: float = 60) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=timeout)


def theirs(server: Server, key: str = "none", timeout: float = 60) -> Anthropic:
    return Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=timeout)


def run(server: Server, work: Callable[[AsyncOpenAI, AsyncAnthropic], Awaitable[Any]]) -> Any:
    """The result of `work` with clients of its own event loop."""

    async def main() -> Any:
        options: Any = {"max_retries": 0, "timeout": 60}
        async with (
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", **options) as ours,
            AsyncAnthropic(base_url=server.url, api_key="none", **options) as theirs,
        ):
            return await work(ours, theirs)

    return asyncio.run(main())


async def gather(stream: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in stream]


def of_chat(answer: Any) -> Said:
    choice, usage = answer.choices[0], answer.usage
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return choice.message.content, choice.finish_reason, counts


def of_chat_chunks(chunks: list[Any]) -> Said:
    *chunks, last = chunks
    deltas = [chunk.choices[0] for chunk in chunks]
    assert deltas[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for choice in deltas)
    counts = (last.usage.prompt_tokens, last.usage.completion_tokens)
    return text, deltas[-1].finish_reason, counts


def of_completion(answer: Any) -> Said:
    choice, usage = answer.choices[0], answer.usage
    return choice.text, choice.finish_reason, (usage.prompt_tokens, usage.completion_tokens)


def of_completion_chunks(chunks: list[Any]) -> Said:
    *chunks, last = chunks
    text = "".join(chunk.choices[0].text for chunk in chunks)
    counts = (last.usage.prompt_tokens, last.usage.completion_tokens)
    return text, chunks[-1].choices[0].finish_reason, counts


def of_response(answer: Any) -> Said:
    counts = (answer.usage.input_tokens, answer.usage.output_tokens)
    return answer.output_text, answer.status, counts


def of_response_events(events: list[Any]) -> Said:
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = of_response(events[-1].response)
    assert text == final[0]
    return final


def of_message(answer: Any) -> Said:
    usage = answer.usage
    counts = (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens)
    return answer.content[0].text, answer.stop_reason, counts


def of_message_events(events: list[Any]) -> Said:
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    (end,) = [event for event in events if event.type == "message_delta"]
    usage = end.usage
    counts = (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens)
    return text, end.delta.stop_reason, counts


class TestEveryWay:
    """Whole, streamed, sync and async say the same."""

    def test_chat(self, server: Server, client: OpenAI) -> None:
        streamed: Any = {**CHAT, **DRAWN, "stream": True, "stream_options": {"include_usage": True}}
        expected = of_chat(client.chat.completions.create(**CHAT, **DRAWN))
        assert expected[2][1] > 2
        assert of_chat_chunks(list(client.chat.completions.create(**streamed))) == expected

        async def work(client: AsyncOpenAI, _: AsyncAnthropic) -> list[Said]:
            whole = await client.chat.completions.create(**CHAT, **DRAWN)
            chunks = await gather(await client.chat.completions.create(**streamed))
            return [of_chat(whole), of_chat_chunks(chunks)]

        assert run(server, work) == [expected, expected]

    def test_completions(self, server: Server, client: OpenAI) -> None:
        drawn: Any = {**COMPLETION, **DRAWN}
        streamed: Any = {**drawn, "stream": True, "stream_options": {"include_usage": True}}
        expected = of_completion(client.completions.create(**drawn))
        assert expected[2][1] > 2
        assert of_completion_chunks(list(client.completions.create(**streamed))) == expected

        async def work(client: AsyncOpenAI, _: AsyncAnthropic) -> list[Said]:
            whole = await client.completions.create(**drawn)
            chunks = await gather(await client.completions.create(**streamed))
            return [of_completion(whole), of_completion_chunks(chunks)]

        assert run(server, work) == [expected, expected]

    def test_responses(self, server: Server, client: OpenAI) -> None:
        drawn: Any = {**RESPONSE, "temperature": 1, "extra_body": {"seed": 11}}
        expected = of_response(client.responses.create(**drawn))
        assert expected[2][1] > 2
        assert of_response_events(list(client.responses.create(**drawn, stream=True))) == expected
        with client.responses.stream(**drawn) as stream:
            assert of_response_events(list(stream)) == expected

        async def work(client: AsyncOpenAI, _: AsyncAnthropic) -> list[Said]:
            whole = await client.responses.create(**drawn)
            events = await gather(await client.responses.create(**drawn, stream=True))
            async with client.responses.stream(**drawn) as stream:
                helped = await gather(stream)
            return [of_response(whole), of_response_events(events), of_response_events(helped)]

        assert run(server, work) == [expected] * 3

    def test_messages(self, server: Server, claude: Anthropic) -> None:
        drawn: Any = {**MESSAGE, "extra_body": DRAWN}
        expected = of_message(claude.messages.create(**drawn))
        assert expected[2][1] > 2
        assert of_message_events(list(claude.messages.create(**drawn, stream=True))) == expected
        with claude.messages.stream(**drawn) as stream:
            assert of_message(stream.get_final_message()) == expected

        async def work(_: AsyncOpenAI, client: AsyncAnthropic) -> list[Said]:
            whole = await client.messages.create(**drawn)
            events = await gather(await client.messages.create(**drawn, stream=True))
            async with client.messages.stream(**drawn) as stream:
                final = await stream.get_final_message()
            return [of_message(whole), of_message_events(events), of_message(final)]

        assert run(server, work) == [expected] * 3

    def test_models_and_counts(self, server: Server, client: OpenAI, claude: Anthropic) -> None:
        asked: Any = {"model": MODEL, "messages": HELLO}
        num_tokens = claude.messages.count_tokens(**asked).input_tokens
        assert num_tokens == of_message(claude.messages.create(**MESSAGE))[2][0]

        async def work(client: AsyncOpenAI, claude: AsyncAnthropic) -> list[Any]:
            listed = await client.models.list()
            found = await client.models.retrieve(MODEL)
            count = await claude.messages.count_tokens(**asked)
            return [[model.id for model in listed.data], found.id, count.input_tokens]

        assert run(server, work) == [[MODEL], MODEL, num_tokens]
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


class TestOneText:
    def test_every_api_says_what_a_chat_says(self, client: OpenAI, claude: Anthropic) -> None:
        chat, finish_reason, counts = of_chat(client.chat.completions.create(**CHAT, **DRAWN))
        extra: Any = {"extra_body": DRAWN}
        response = of_response(client.responses.create(**RESPONSE, **extra))
        message = of_message(claude.messages.create(**MESSAGE, **extra))
        status = {"stop": "completed", "length": "incomplete"}[str(finish_reason)]
        stop_reason = {"stop": "end_turn", "length": "max_tokens"}[str(finish_reason)]
        assert response == (chat, status, counts)
        assert message == (chat, stop_reason, counts)

    def test_several_choices_are_told_apart(self, client: OpenAI) -> None:
        chat: Any = {**CHAT, **DRAWN, "n": 3}
        whole = [
            choice.message.content for choice in client.chat.completions.create(**chat).choices
        ]
        assert len(set(whole)) == 3
        streamed = ["", "", ""]
        for chunk in client.chat.completions.create(**chat, stream=True):
            choice = chunk.choices[0]
            streamed[choice.index] += choice.delta.content or ""
        assert streamed == whole

    def test_logprobs_are_the_same_in_every_shape(self, client: OpenAI) -> None:
        top: Any = {"top_logprobs": 2}
        chat = client.chat.completions.create(**CHAT, **DRAWN, logprobs=True, **top)
        assert chat.choices[0].logprobs is not None
        expected = [entry.to_dict() for entry in chat.choices[0].logprobs.content or ()]
        assert len(expected) > 2
        include: Any = {"include": ["message.output_text.logprobs"], "extra_body": DRAWN}
        response: Any = client.responses.create(**RESPONSE, **include, **top)
        found = [entry.to_dict() for entry in response.output[0].content[0].logprobs]
        assert found == expected
        prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        plain: Any = {**COMPLETION, "prompt": prompt, "logprobs": 2}
        completion = client.completions.create(**plain, **DRAWN).choices[0].logprobs
        assert completion is not None
        assert completion.token_logprobs == [entry["logprob"] for entry in expected]

    def test_a_stop_string_ends_every_answer_alike(self, client: OpenAI, claude: Anthropic) -> None:
        text = of_chat(client.chat.completions.create(**CHAT, **DRAWN))[0]
        stop = text[2]
        before = text[: text.index(stop)]
        chat = client.chat.completions.create(**CHAT, **DRAWN, stop=[stop])
        assert of_chat(chat)[:2] == (before, "stop")
        message = claude.messages.create(**MESSAGE, stop_sequences=[stop], extra_body=DRAWN)
        assert of_message(message)[:2] == (before, "stop_sequence")
        assert message.stop_sequence == stop


class TestErrors:
    def test_a_bad_parameter(self, client: OpenAI, claude: Anthropic) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**CHAT, "temperature": -1})
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{**RESPONSE, "max_output_tokens": 0}, stream=True)
        assert caught.value.param == "max_output_tokens"
        with pytest.raises(anthropic.BadRequestError, match="top_k") as refused:
            claude.messages.create(**MESSAGE, extra_body={"top_k": -5}, stream=True)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]

    def test_another_model(self, client: OpenAI, claude: Anthropic) -> None:
        for call in (
            lambda: client.chat.completions.create(**{**CHAT, "model": "gpt"}),
            lambda: client.completions.create(**{**COMPLETION, "model": "gpt"}),
            lambda: client.responses.create(**{**RESPONSE, "model": "gpt"}),
            lambda: client.models.retrieve("gpt"),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert caught.value.code == "model_not_found"
        for ask in (
            lambda: claude.messages.create(**{**MESSAGE, "model": "opus"}),
            lambda: claude.messages.count_tokens(model="opus", messages=HELLO),
        ):
            with pytest.raises(anthropic.NotFoundError, match="opus"):
                ask()


class TestContext:
    def test_an_answer_ends_with_it_in_the_words_of_its_api(self, strict: Server) -> None:
        text = "x" * (CONTEXT - 100)
        chat: Any = {**endless(CHAT), "messages": [{"role": "user", "content": text}]}
        client, claude = ours(strict, "first"), theirs(strict, "first")
        content, finish_reason, counts = of_chat(client.chat.completions.create(**chat))
        assert sum(counts) == CONTEXT
        assert finish_reason == "length"
        response = client.responses.create(**{**endless(RESPONSE), "input": text})
        assert of_response(response) == (content, "incomplete", counts)
        message = claude.messages.create(**chat)
        assert of_message(message) == (content, "model_context_window_exceeded", counts)


class TestLeaving:
    """Whoever leaves an answer that would go on for minutes ends it."""

    def test_a_stream_that_is_closed(self, tireless: Server) -> None:
        client, claude = ours(tireless), theirs(tireless)
        streams: list[Any] = [
            client.chat.completions.create(**endless(CHAT), stream=True),
            client.completions.create(**endless(COMPLETION), stream=True),
            client.responses.create(**endless(RESPONSE), stream=True),
            claude.messages.create(**endless(MESSAGE), stream=True),
        ]
        for stream in streams:
            next(iter(stream))
        wait_until(tireless, NUM_AT_ONCE)
        for num_left, stream in enumerate(streams, 1):
            stream.close()
            wait_until(tireless, NUM_AT_ONCE - num_left)

    def test_a_call_that_is_cancelled(self, tireless: Server) -> None:
        async def work(client: AsyncOpenAI, claude: AsyncAnthropic) -> None:
            calls: list[Coroutine[Any, Any, Any]] = [
                client.chat.completions.create(**endless(CHAT)),
                client.completions.create(**endless(COMPLETION)),
                client.responses.create(**endless(RESPONSE)),
                claude.messages.create(**endless(MESSAGE)),
            ]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.to_thread(wait_until, tireless, NUM_AT_ONCE)
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(wait_until, tireless, 0)

        run(tireless, work)

    def test_a_call_that_times_out_at_the_client(self, tireless: Server) -> None:
        client, claude = ours(tireless, timeout=0.5), theirs(tireless, timeout=0.5)
        for call in (
            lambda: client.chat.completions.create(**endless(CHAT)),
            lambda: client.responses.create(**endless(RESPONSE)),
        ):
            with pytest.raises(openai.APITimeoutError):
                call()
        with pytest.raises(anthropic.APITimeoutError):
            claude.messages.create(**endless(MESSAGE))
        wait_until(tireless, 0)


def endless(call: Any) -> Any:
    """`call` without a limit."""
    limit = "max_output_tokens" if "input" in call else "max_tokens"
    return {**call, limit: 30_000, "extra_body": {"temperature": 0}}


def wait_until(server: Server, num_running: int) -> None:
    wait_for(server.http, {"num_requests_running": num_running})


class TestKeysAndLimits:
    def test_a_key_opens_every_api(self, strict: Server) -> None:
        for key in ("first", "second"):
            assert ours(strict, key).responses.create(**RESPONSE).output_text
            assert theirs(strict, key).messages.create(**MESSAGE).content

    def test_another_key_opens_none(self, strict: Server) -> None:
        with pytest.raises(openai.AuthenticationError):
            ours(strict, "third").responses.create(**RESPONSE)
        with pytest.raises(openai.AuthenticationError):
            ours(strict, "third").models.list()
        with pytest.raises(anthropic.AuthenticationError) as caught:
            theirs(strict, "third").messages.create(**MESSAGE)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]

    def test_one_too_many_is_told_to_come_back(self, strict: Server) -> None:
        client, claude = ours(strict, "first"), theirs(strict, "first")
        chat: Any = {**endless(CHAT), "stream": True}
        running = client.chat.completions.create(**chat)
        next(iter(running))
        waiting = client.chat.completions.create(**chat)
        with pytest.raises(openai.RateLimitError) as caught:
            client.responses.create(**RESPONSE)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(anthropic.RateLimitError) as refused:
            claude.messages.create(**MESSAGE)
        assert refused.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        assert int(refused.value.response.headers["retry-after"]) >= 1
        running.close()
        waiting.close()


class TestDeadlines:
    def test_a_whole_answer_that_is_late(self, tireless: Server) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            ours(tireless).responses.create(**{**endless(RESPONSE), **LATE})
        assert (caught.value.status_code, caught.value.code) == (408, "timeout")
        with pytest.raises(anthropic.APIStatusError) as refused:
            theirs(tireless).messages.create(**{**endless(MESSAGE), **LATE})
        assert refused.value.status_code == 408
        assert refused.value.body["error"]["type"] == "timeout_error"  # type: ignore[index]

    def test_a_stream_that_is_late_has_its_tokens_and_then_the_reason(
        self, tireless: Server
    ) -> None:
        late: Any = {**endless(RESPONSE), **LATE}
        events = list(ours(tireless).responses.create(**late, stream=True))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        last: Any = events[-1]
        assert last.type == "response.failed"
        assert last.response.output_text == text
        assert last.response.usage.output_tokens >= len(text)
        assert "timeout_ms" in last.response.error.message
        kinds: list[str] = []
        with pytest.raises(anthropic.APIStatusError, match="timeout_ms") as caught:
            kinds.extend(
                part.type
                for part in theirs(tireless).messages.create(
                    **{**endless(MESSAGE), **LATE}, stream=True
                )
            )
        assert caught.value.body["error"]["type"] == "timeout_error"  # type: ignore[index]
        assert kinds[0] == "message_start"
        assert "message_stop" not in kinds


class TestCoreThatDies:
    def test_streams_end_in_the_words_of_their_api(self, tireless: Server) -> None:
        response, message = endless(RESPONSE), endless(MESSAGE)
        events = iter(ours(tireless).responses.create(**response, stream=True))
        parts = iter(theirs(tireless).messages.create(**message, stream=True))
        next(events)
        next(parts)
        os.kill(tireless.core_pid, signal.SIGKILL)
        last = list(events)[-1]
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert last.response.error.code == "server_error"
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(parts)
        assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
