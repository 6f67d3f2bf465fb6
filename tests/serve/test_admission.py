"""Who is let in, who has waited or run for too long, and who went away."""

import contextlib
import json
import math
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nano.engine.messages import EngineReady
from nano.engine.timeline import Timeline
from nano.errors import InvalidRequest
from nano.serve.admission import Admission, DrainRate
from nano.serve.congestion import Congestion
from nano.serve.http.errors import Refusal
from nano.serve.options import ServerOptions
from tests.serve.scrape import IDLE, scrape, wait_for
from tests.serve.server import Server

ROUTE = "/v1/completions"
LONG = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True, "seed": 1}
NUM_RUNNING, NUM_WAITING, NUM_WAITING_TOKENS = 2, 3, 100


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    server = Server(
        checkpoint,
        *("--max-num-seqs", str(NUM_RUNNING), "--max-num-batched-tokens", "256"),
        *("--max-waiting-requests", str(NUM_WAITING)),
        *("--max-waiting-tokens", str(NUM_WAITING_TOKENS)),
        *("--sse-keep-alive-interval", "0.05", "--compile-mode", "eager"),
    )
    yield server
    server.stop()


@contextlib.contextmanager
def streams(server: Server, count: int, **body: Any) -> Iterator[list[httpx.Response]]:
    """So many streams whose headers have come; closed at the end."""
    with contextlib.ExitStack() as stack:
        replies = []
        for _ in range(count):
            context = server.http.stream("POST", ROUTE, json={**LONG, "stream": True, **body})
            replies.append(stack.enter_context(context))
            assert replies[-1].status_code == 200
        yield replies


@contextlib.contextmanager
def occupied(server: Server) -> Iterator[None]:
    """The engine runs as much as it can, and nobody waits; idle again afterwards."""
    with streams(server, NUM_RUNNING):
        wait_for(server.http, {"num_requests_running": NUM_RUNNING, "num_requests_waiting": 0})
        yield
    wait_for(server.http, IDLE)


def post(server: Server, **body: Any) -> httpx.Response:
    return server.http.post(ROUTE, json={**LONG, **body})


def error_of(reply: httpx.Response, status: int, code: str | None) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error["code"] == code
    if status == 429:
        assert error["type"] == "rate_limit_error"
        assert 1 <= int(reply.headers["Retry-After"]) <= 60
    return error


def events(text: str) -> list[dict[str, Any] | str]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


class TestLimits:
    def test_who_would_wait_beyond_the_limit_is_told_to_come_back_and_the_core_never_hears_of_it(
        self, server: Server
    ) -> None:
        with occupied(server), streams(server, NUM_WAITING):
            wait_for(server.http, {"num_requests_waiting": NUM_WAITING})
            before = scrape(server.http)
            error = error_of(post(server), 429, "queue_full")
            assert "at most 3 requests may wait, and this call makes it 4" in error["message"]
            with pytest.raises(openai.RateLimitError):
                server.client().completions.create(model="tiny", prompt="x")
            after = scrape(server.http)
            rejections = "admission_rejections_total{reason=waiting_requests}"
            assert after[rejections] - before.get(rejections, 0) == 2
            assert after["num_requests_waiting"] == NUM_WAITING

    def test_a_full_queue_turns_calls_for_tokens_away_unread_and_no_others(
        self, server: Server
    ) -> None:
        message = {"role": "user", "content": "hi"}
        calls: dict[str, dict[str, Any]] = {
            ROUTE: {"prompt": "x", "max_tokens": "many"},
            "/v1/chat/completions": {"messages": [message], "max_tokens": -1},
            "/v1/responses": {"input": 5},
            "/v1/messages": {},
        }
        with occupied(server), streams(server, NUM_WAITING):
            wait_for(server.http, {"num_requests_waiting": NUM_WAITING})
            for route, body in calls.items():
                assert server.http.post(route, json=body).status_code == 429, route
                assert server.http.post(route, content=b"{").status_code == 429, route
            for route in ("/v1/models", "/v1/models/tiny", "/metrics", "/health"):
                assert server.http.get(route).status_code == 200, route
            assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        for route, body in calls.items():
            assert server.http.post(route, json=body).status_code == 400, route

    def test_a_client_that_leaves_while_its_request_waits_makes_room(self, server: Server) -> None:
        with occupied(server), streams(server, NUM_WAITING - 1):
            with streams(server, 1):
                wait_for(server.http, {"num_requests_waiting": NUM_WAITING})
                error_of(post(server), 429, "queue_full")
            wait_for(server.http, {"num_requests_waiting": NUM_WAITING - 1})
            with streams(server, 1):
                wait_for(server.http, {"num_requests_waiting": NUM_WAITING})

    def test_each_prompt_and_each_choice_counts(self, server: Server) -> None:
        with occupied(server):
            error = error_of(post(server, n=4), 429, "queue_full")
            assert "makes it 4" in error["message"]
            error_of(post(server, prompt=["a", "b"], n=2), 429, "queue_full")
            with streams(server, 1, n=3):
                wait_for(server.http, {"num_requests_waiting": 3})

    def test_a_call_that_could_never_enter_is_a_bad_request(self, server: Server) -> None:
        error = error_of(post(server, n=6), 400, None)
        assert error["param"] == "n"
        assert "at most 5 requests" in error["message"]

    def test_prompt_tokens_that_would_wait_are_limited_and_those_that_begin_at_once_are_not(
        self, server: Server
    ) -> None:
        long = "x" * (NUM_WAITING_TOKENS + 1)
        reply = post(server, prompt=long, max_tokens=1)
        assert reply.status_code == 200, reply.text
        with occupied(server):
            error = error_of(post(server, prompt=long), 429, "queue_full")
            assert (
                "at most 100 prompt tokens may wait, and this call makes it 101"
                in (error["message"])
            )
            with streams(server, 1, prompt=long[:60]):
                wait_for(server.http, {"num_requests_waiting": 1})
                error_of(post(server, prompt=long[:41]), 429, "queue_full")
                with streams(server, 1, prompt=long[:40]):
                    wait_for(server.http, {"num_requests_waiting": 2})

    def test_of_a_crowd_each_is_answered_in_full_or_turned_away(self, server: Server) -> None:
        body = {"prompt": "x", "max_tokens": 20, "return_token_ids": True}
        alone = post(server, **body).json()["choices"][0]["token_ids"]
        with ThreadPoolExecutor(40) as pool:
            replies = list(pool.map(lambda _: post(server, **body), range(40)))
        answered = [reply for reply in replies if reply.status_code == 200]
        assert len(answered) >= NUM_RUNNING + NUM_WAITING
        assert [r.json()["choices"][0]["token_ids"] for r in answered] == [alone] * len(answered)
        for reply in replies:
            if reply.status_code != 200:
                error_of(reply, 429, "queue_full")
        wait_for(server.http, IDLE)


class TestDeadlines:
    def test_a_request_whose_turn_does_not_come_in_time_is_told_to_come_back(
        self, server: Server
    ) -> None:
        with occupied(server):
            before = scrape(server.http)
            error_of(post(server, max_queue_ms=20), 429, "queue_timeout")
            after = scrape(server.http)
            assert after["num_requests_waiting"] == 0
            assert after["prefix_cache_queries_total"] == before["prefix_cache_queries_total"]
            for name in (
                "request_success_total{finished_reason=queue_timeout}",
                "admission_rejections_total{reason=queue_timeout}",
            ):
                assert after[name] == before.get(name, 0) + 1

    def test_one_choice_whose_turn_does_not_come_in_time_ends_the_call(
        self, server: Server
    ) -> None:
        with streams(server, NUM_RUNNING - 1):
            wait_for(server.http, {"num_requests_running": NUM_RUNNING - 1})
            late = "request_success_total{finished_reason=queue_timeout}"
            before = scrape(server.http)[late]
            error_of(post(server, n=2, max_queue_ms=200), 429, "queue_timeout")
            wait_for(server.http, {"num_requests_running": NUM_RUNNING - 1})
            assert scrape(server.http)[late] == before + 2  # the one that ran, too
        wait_for(server.http, IDLE)

    def test_a_request_that_has_begun_in_time_keeps_its_turn(self, server: Server) -> None:
        reply = post(server, max_queue_ms=60_000, timeout_ms=120_000, max_tokens=30)
        assert reply.json()["usage"]["completion_tokens"] == 30

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_request_that_has_not_ended_in_time_is_ended_and_its_blocks_are_free(
        self, server: Server, waits: bool
    ) -> None:
        with occupied(server) if waits else contextlib.nullcontext():
            error = error_of(post(server, timeout_ms=50), 408, "timeout")
            assert "timeout_ms" in error["message"]
        wait_for(server.http, IDLE)

    def test_a_stream_that_has_not_ended_in_time_gives_all_tokens_so_far_and_an_error(
        self, server: Server
    ) -> None:
        body = {"return_token_ids": True, "timeout_ms": 1500}
        reply = post(server, stream=True, **body)
        assert reply.status_code == 200
        *chunks, last = events(reply.text)
        assert isinstance(last, dict)
        assert last["error"]["code"] == "timeout"
        choices = [c["choices"][0] for c in chunks if isinstance(c, dict)]
        assert not any(choice["finish_reason"] for choice in choices)
        token_ids = [i for choice in choices for i in choice["token_ids"]]
        body = {"return_token_ids": True, "max_tokens": len(token_ids)}
        whole = post(server, **body).json()["choices"][0]
        assert token_ids == whole["token_ids"]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        wait_for(server.http, IDLE)

    def test_a_stream_whose_turn_does_not_come_in_time_ends_with_an_error(
        self, server: Server
    ) -> None:
        with occupied(server):
            (last,) = events(post(server, stream=True, max_queue_ms=20).text)
        assert isinstance(last, dict)
        assert last["error"]["code"] == "queue_timeout"


class TestConnections:
    def test_a_stream_that_waits_has_its_headers_and_shows_life(self, server: Server) -> None:
        with occupied(server), streams(server, 1) as (waiting,):
            text = waiting.iter_text()
            received = ""
            while received.count(": keep-alive\n\n") < 3:
                received += next(text)
            assert received.replace(": keep-alive\n\n", "") == ""

    @pytest.mark.parametrize("is_streamed", [True, False])
    def test_a_client_that_leaves_gives_its_blocks_back(
        self, server: Server, is_streamed: bool
    ) -> None:
        body = {**LONG, "stream": is_streamed}
        aborted = "request_success_total{finished_reason=abort}"
        before = scrape(server.http)[aborted]
        with socket.create_connection(("127.0.0.1", server.http.base_url.port or 0)) as line:
            content = json.dumps(body).encode()
            head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            line.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            wait_for(server.http, {"num_requests_running": 1})
            assert scrape(server.http)["kv_cache_usage_perc"] > 0
        wait_for(server.http, IDLE)
        assert scrape(server.http)[aborted] == before + 1  # not run to its end

    def test_a_reader_that_lags_behind_loses_nothing_and_holds_up_nobody(
        self, server: Server
    ) -> None:
        body = {"max_tokens": 2000, "logprobs": 5, "return_token_ids": True, "seed": 7}
        whole = post(server, **body).json()["choices"][0]
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", server.http.base_url.port or 0))
            content = json.dumps({**LONG, **body, "stream": True}).encode()
            head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            line.sendall(head.encode() + content)
            wait_for(server.http, {"num_requests_running": 1})
            assert post(server, max_tokens=10).status_code == 200
            wait_for(server.http, IDLE)  # it is computed although nobody has read it
            received = b""
            while piece := line.recv(1 << 16):
                received += piece
        *chunks, done = events(unchunked(received))
        assert done == "[DONE]"
        choices = [c["choices"][0] for c in chunks if isinstance(c, dict)]
        assert [i for c in choices for i in c.get("token_ids", ())] == whole["token_ids"]
        assert "".join(c["text"] for c in choices) == whole["text"]
        logprobs = [c["logprobs"] for c in choices if c["logprobs"] is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [entry for one in logprobs for entry in one[name]] == whole["logprobs"][name]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        assert len(chunks) < len(whole["token_ids"])  # what was not read was put together


def unchunked(received: bytes) -> str:
    """The body of an HTTP answer in chunks."""
    rest = received.partition(b"\r\n\r\n")[2]
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            return body.decode()
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestDrainRate:
    def test_the_time_to_leave_follows_the_rate_of_requests_and_of_tokens(self) -> None:
        drain = DrainRate(0.0)
        for second in range(1, 11):  # one request and 100 tokens a second
            drain.note(100, float(second))
        assert drain.seconds(5, 0, now=10.0) == pytest.approx(5.0)
        assert drain.seconds(1, 2000, now=10.0) == pytest.approx(20.0)

    def test_what_left_long_ago_no_longer_counts(self) -> None:
        drain = DrainRate(0.0)
        for _ in range(1000):
            drain.note(1, 1.0)
        for second in range(31, 61):
            drain.note(1, float(second))
        assert drain.seconds(10, 0, now=60.0) == pytest.approx(10.0)

    def test_a_queue_that_nobody_leaves_is_taken_to_last_as_long_again(self) -> None:
        drain = DrainRate(0.0)
        assert drain.seconds(5, 5, now=12.0) == 12.0
        drain.restart(20.0)
        assert drain.seconds(5, 5, now=20.5) == 1.0


class TestAdmission:
    def make(self, clock: Clock, **options: Any) -> Admission:
        ready = EngineReady(1024, 100, 16, 512, "nano", max_num_requests=4)
        congestion = Congestion(math.inf, clock, lambda note: None)
        return Admission(ready, ServerOptions(**options), lambda reason: None, clock, congestion)

    def test_the_limit_is_sixteen_times_what_runs_and_several_front_ends_share_it(self) -> None:
        for num_front_ends, num_places in ((1, 4 + 64), (2, 2 + 32), (3, 2 + 22)):
            admission = self.make(Clock(), api_server_count=num_front_ends)
            admission.check([1] * num_places)
            with pytest.raises(InvalidRequest):
                admission.check([1] * (num_places + 1))

    def test_retry_after_is_how_long_the_queue_takes_at_the_rate_at_which_it_drains(self) -> None:
        clock = Clock()
        admission = self.make(clock, max_waiting_requests=20)
        timelines = [Timeline(10, 1, clock.now) for _ in range(44)]
        for timeline in timelines[:24]:
            admission.entered(timeline)
        for index in range(20):  # one every two seconds
            clock.now += 2
            timelines[index].begun_time = clock.now
            admission.begun(timelines[index])
            if index >= 4:
                admission.ended(timelines[index - 4])
            admission.entered(timelines[24 + index])
        with pytest.raises(Refusal, match="try again in 48 s") as refusal:
            admission.check([1])
        assert refusal.value.headers == {"Retry-After": "48"}

    def test_whatever_becomes_of_requests_the_door_is_open_in_the_end(self) -> None:
        admission = self.make(Clock(), max_waiting_requests=1, max_waiting_tokens=1)
        begun, waiting = Timeline(10, 1, 0.0), Timeline(10, 1, 0.0)
        for timeline in (begun, waiting):
            admission.entered(timeline)
        admission.begun(begun)
        for timeline in (begun, waiting):
            admission.ended(timeline)
        admission.check([100] * 4)
        with pytest.raises(Refusal):
            admission.check([100] * 5)

    def test_calls_on_their_way_wait_too_so_that_no_more_are_read_than_can_be_let_in(self) -> None:
        admission = self.make(Clock(), max_waiting_requests=1)
        arrivals = [admission.arrive() for _ in range(5)]
        for refused in (admission.meet, admission.arrive, lambda: admission.check([1])):
            with pytest.raises(Refusal, match="this call makes it 2"):
                refused()
        arrivals[0].end()
        arrivals[0].end()  # sent to the core, and then the call ends
        admission.check([1])
        with admission.arrive(), pytest.raises(Refusal):
            admission.arrive()
        with pytest.raises(Refusal):
            admission.check([1, 1])
