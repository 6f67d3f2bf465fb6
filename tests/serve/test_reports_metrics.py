"""What users of other engines reported about metrics, the prefix cache and the queue, as far as a
server shows it (ids like B034). The rest is in test_metrics.py, test_admission.py, tests/scheduler,
tests/kv_cache and tests/test_llm.py.
"""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nano.engine.messages import EngineReady
from nano.serve.metrics.core_metrics import CoreMetrics
from nano.serve.metrics.request_metrics import Metrics
from tests.serve.both_ways import COMPLETIONS, ask_one, post
from tests.serve.scrape import IDLE, scrape, wait_for
from tests.serve.server import Server
from tests.serve.words import NAN_TOKEN_ID

GREEDY = {"temperature": 0, "seed": 1, "ignore_eos": True}
WORDS = {**GREEDY, "logit_bias": {str(NAN_TOKEN_ID): -100}}


def tokens(count: int, seed: object) -> list[int]:
    """Below 256, so that both checkpoints know them; none is special."""
    rng = random.Random(f"{seed}")
    return [rng.randrange(3, 256) for _ in range(count)]


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


INFO = "nano:cache_config_info"

# --- metrics -------------------------------------------------------------------------------------


def test_a_page_without_traffic_and_with_any_name_is_valid() -> None:  # B125
    name = 'a "quoted"\\back\nline{x="y"}'
    metrics = Metrics(name, max_model_len=64)
    for stats in ({}, {"num_running": 0.0, "kv_cache_usage": 0.0}):
        page = metrics.render(CoreMetrics(stats, EngineReady(64, 32, 16, 64, "nano-x"), name))
        families = [*text_string_to_metric_families(page.decode())]
        samples = [sample for family in families for sample in family.samples]
        assert len(samples) > 100
        assert {sample.labels["model_name"] for sample in samples} == {name}
        assert all(sample.value == 0 for sample in samples if sample.name != INFO)


def test_times_are_parts_of_what_the_clients_waited_and_counters_only_grow(
    server: Server,
) -> None:  # B125: no bound on speed, which is the machine's
    wait_for(server.http, IDLE)
    before = scrape(server.http)
    pages, is_over = [before], threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not is_over.is_set():
                pages.append(scrape(http))

    def call(index: int) -> tuple[float, float, int]:
        """Seconds to the first chunk and to the end; how many tokens."""
        num_tokens = 4 + index
        body = {"prompt": tokens(9, index), "max_tokens": num_tokens, "stream": True, **GREEDY}
        begun, first = time.monotonic(), 0.0
        with (
            httpx.Client(base_url=server.url, timeout=60) as http,
            http.stream("POST", COMPLETIONS, json=body) as reply,
        ):
            for line in reply.iter_lines():
                if line and not first:
                    first = time.monotonic() - begun
        return first, time.monotonic() - begun, num_tokens

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(20) as pool:
        seen = [*pool.map(call, range(20))]
    is_over.set()
    watching.join()
    wait_for(server.http, IDLE)
    pages.append(scrape(server.http))

    grown = {name: value - before.get(name, 0) for name, value in pages[-1].items()}
    first, whole, num_tokens = (sum(column) for column in zip(*seen))
    assert 0 < grown["time_to_first_token_seconds_sum"] <= first
    assert 0 < grown["e2e_request_latency_seconds_sum"] <= whole
    assert 0 < grown["inter_token_latency_seconds_sum"] <= whole
    assert grown["inter_token_latency_seconds_count"] == num_tokens - 20
    assert grown["time_to_first_token_seconds_bucket{le=+Inf}"] == 20
    for page in pages:
        assert 0 <= page["kv_cache_usage_perc"] <= 1
        assert min(page.values()) >= 0
        check_histograms(page)
    for earlier, later in pairwise(pages):
        for name, value in later.items():
            if "_total" in name or "_bucket" in name or name.endswith(("_sum", "_count")):
                assert value >= earlier.get(name, 0), name
    assert max(page["num_requests_running"] for page in pages) > 0


def check_histograms(page: dict[str, float]) -> None:
    """Buckets are cumulative, and the last is the count."""
    buckets: dict[str, list[tuple[float, float]]] = {}
    for name, value in page.items():
        series, is_bucket, bound = name.partition("_bucket{le=")
        if is_bucket:
            buckets.setdefault(series, []).append((float(bound.rstrip("}")), value))
    assert len(buckets) > 10
    for series, pairs in buckets.items():
        counts = [count for _, count in sorted(pairs)]
        assert counts == sorted(counts)
        assert counts[-1] == page[f"{series}_count"]


# --- the prefix cache ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "most_cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (48, 32)]
)
def test_a_prompt_that_is_cached_whole_is_answered_as_if_it_were_not(
    server: Server, length: int, most_cached: int
) -> None:  # B028
    prompt, wish = tokens(length, f"of {length}"), {**GREEDY, "logprobs": 3, "max_tokens": 5}
    answers = [post(server, COMPLETIONS, {"prompt": prompt, **wish}) for _ in range(3)]
    assert [num_cached(answer) for answer in answers] == [0, most_cached, most_cached]
    at_once = post(server, COMPLETIONS, {"prompt": [prompt] * 3, **wish})
    assert num_cached(at_once) == 3 * most_cached
    told = [
        {**choice, "index": 0} for answer in (*answers, at_once) for choice in answer["choices"]
    ]
    assert told == [told[0]] * 6


def test_a_block_that_was_given_away_is_not_found_under_its_old_content(
    words_server: Server,
) -> None:  # B029: the cache holds five such prompts
    body = {"prompt": tokens(96, "first"), **WORDS, "logprobs": 2, "max_tokens": 6}
    first = post(words_server, COMPLETIONS, body, cache_salt="first")
    for turn in range(2):
        others = [tokens(96, f"{turn} {index}") for index in range(5)]
        post(words_server, COMPLETIONS, {**body, "prompt": others})
        again = post(words_server, COMPLETIONS, body, cache_salt="first")
        assert again["choices"] == first["choices"]
        assert num_cached(again) < 96 - 16


def test_tenants_with_different_salts_share_nothing_and_are_answered_alike(
    server: Server,
) -> None:  # B031
    body = {"prompt": tokens(64, "salted"), **GREEDY, "max_tokens": 4}
    answers = [
        post(server, COMPLETIONS, body, **salt)
        for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}, {})
    ]
    assert [num_cached(answer) for answer in answers] == [0, 0, 48, 0, 48]
    assert [answer["choices"] for answer in answers] == [answers[0]["choices"]] * 5
    for salt in ("", 5):
        reply = server.http.post(COMPLETIONS, json={**body, "cache_salt": salt})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")


def test_logprobs_of_a_prompt_are_whole_whatever_is_cached_and_however_it_is_cut(
    server: Server,
) -> None:  # B032, B041: a step takes at most 256 tokens
    text = "".join(random.Random(5).choices("abcdefgh ", k=600))
    wish = {**GREEDY, "echo": True, "logprobs": 2, "max_tokens": 1}
    whole = ask_one(server, COMPLETIONS, {"prompt": text, **wish})
    post(server, COMPLETIONS, {"prompt": text, **GREEDY, "max_tokens": 1})
    again = ask_one(server, COMPLETIONS, {"prompt": text, **wish})
    assert whole.logprobs == again.logprobs
    assert len(whole.logprobs) == 601
    assert "".join(token for token, *_ in whole.logprobs[:600]) == text
    assert [logprob is None for _, logprob, *_ in whole.logprobs] == [True] + [False] * 600
    for length in (32, 40, 255, 256, 257, 513):
        part = ask_one(server, COMPLETIONS, {"prompt": text[:length], **wish})
        assert part.logprobs[:length] == whole.logprobs[:length]


def test_requests_of_any_length_give_every_block_back(words_server: Server) -> None:  # B034
    def call(index: int) -> None:
        length = (15, 16, 17, 31, 32, 33, 48)[index % 7]
        body = {"prompt": tokens(length, index % 11), **WORDS, "max_tokens": 1 + index % 3}
        post(words_server, COMPLETIONS, body, n=1 + index % 2)

    with ThreadPoolExecutor(8) as pool:
        [*pool.map(call, range(77))]
    wait_for(words_server.http, IDLE)  # what is cached and free is not in use
    body = {"prompt": tokens(500, "large"), **WORDS, "max_tokens": 12}
    assert post(words_server, COMPLETIONS, body)["usage"]["completion_tokens"] == 12


# --- the queue -----------------------------------------------------------------------------------


def test_what_never_fits_is_refused_and_what_outgrows_the_cache_ends(
    words_server: Server,
) -> None:  # B043: the context is 1024 tokens, the cache 512
    reply = words_server.http.post(COMPLETIONS, json={"prompt": [5] * 600, "max_tokens": 5})
    assert reply.status_code == 400
    assert "at most 511 fit into the KV cache" in reply.json()["error"]["message"]
    with ThreadPoolExecutor(3) as pool:
        bodies = [{"prompt": [5] * length, **WORDS, "max_tokens": 200} for length in (400, 400, 3)]
        grown, other, short = pool.map(lambda body: post(words_server, COMPLETIONS, body), bodies)
    assert grown["choices"] == other["choices"]
    assert grown["usage"]["completion_tokens"] == 112
    assert grown["choices"][0]["finish_reason"] == "length"
    assert short["usage"]["completion_tokens"] == 200


def test_streams_that_share_the_callers_id_do_not_mix(server: Server) -> None:  # B045
    def call(given: tuple[str, dict[str, Any], dict[str, str]]) -> str:
        prompt, more, headers = given
        body = {"prompt": prompt, "max_tokens": 60, "stream": True, **GREEDY, **more}
        with httpx.Client(base_url=server.url, timeout=60) as http:
            lines = http.post(COMPLETIONS, json=body, headers=headers).text.splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    same = {"X-Request-Id": "same"}
    calls: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("Once", {}, same),
        ("Twice", {}, same),
        ("Thrice", {"request_id": "same"}, {}),
        ("Never", {}, {}),
    ]
    with ThreadPoolExecutor(4) as pool:
        at_once = [*pool.map(call, calls)]
    assert at_once == [call((prompt, {}, {})) for prompt, _, _ in calls]
    assert len({*at_once}) == 4
    assert min(scrape(server.http).values()) >= 0
