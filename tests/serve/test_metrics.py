"""What /metrics and the log say is what happened, to the last token."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano.engine.step_counts import STEP_TOKEN_BOUNDS
from nano.engine.subprocess_client import SubprocessClient
from nano.serve.metrics import stats_log
from nano.serve.metrics.core_stats import CoreStats
from nano.serve.metrics.stats_log import describe, logging_stats
from tests.engine.fake_core import fake_config, fake_request
from tests.engine.test_speculation_reports import make_echo, ngram
from tests.serve.scrape import IDLE, scrape, wait_for
from tests.serve.server import Server

ROUTE = "/v1/completions"
OFF = {"speculative": {"enabled": False}, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = make_echo(tmp_path_factory.mktemp("echo"))
    config = {"proposers": [ngram()], "draft_length": "static"}
    server = Server(
        folder,
        *("--speculative-config", json.dumps(config), "--compile-mode", "eager"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-waiting-requests", "4"),
    )
    yield server
    server.stop()


class Difference(dict[str, float]):
    """By how much every sample has grown since this was made."""

    def __init__(self, http: httpx.Client):
        self._http = http
        wait_for(http, IDLE)
        self._before = scrape(http)

    def take(self) -> "Difference":
        wait_for(self._http, IDLE)
        for name, value in scrape(self._http).items():
            self[name] = value - self._before.get(name, 0)
        return self


def complete(server: Server, prompt: list[int], **body: Any) -> dict[str, Any]:
    reply = server.http.post(ROUTE, json={"prompt": prompt, **OFF, **body})
    assert reply.status_code == 200, reply.text
    usage: dict[str, Any] = reply.json()["usage"]
    return usage


def test_after_a_known_workload_every_number_is_right(server: Server) -> None:
    grown = Difference(server.http)
    one, many = [65] * 100, [66, *range(32, 71)]
    plain = complete(server, one, max_tokens=10)
    cached = complete(server, one, max_tokens=7)
    three = complete(server, many, max_tokens=8, n=3)
    grown.take()

    num_cached = cached["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == 96
    assert (plain["completion_tokens"], three["completion_tokens"]) == (10, 24)
    # Of three equal prompts that start together, two read what the first one wrote: 32 tokens.
    num_prompt, num_hit, num_generated = 100 + 100 + 3 * 40, num_cached + 2 * 32, 10 + 7 + 24
    expected = {
        "prompt_tokens_total": num_prompt,
        "prompt_tokens_cached_total": num_hit,
        "prompt_tokens_by_source_total{source=local_compute}": num_prompt - num_hit,
        "prompt_tokens_by_source_total{source=local_cache_hit}": num_hit,
        "prefix_cache_queries_total": num_prompt,
        "prefix_cache_hits_total": num_hit,
        "generation_tokens_total": num_generated,
        "request_success_total{finished_reason=length}": 5,
        "request_success_total{finished_reason=abort}": 0,
        "num_preemptions_total": 0,
        "inter_token_latency_seconds_count": num_generated - 5,
        "request_prompt_tokens_sum": num_prompt,
        "request_prefill_kv_computed_tokens_sum": num_prompt - num_hit,
        "request_generation_tokens_sum": num_generated,
        "request_generation_tokens_bucket{le=5.0}": 0,
        "request_generation_tokens_bucket{le=10.0}": 5,
        "request_params_max_tokens_sum": 10 + 7 + 8,
        "request_params_max_tokens_count": 3,
        "request_params_n_sum": 1 + 1 + 3,
        "request_params_n_bucket{le=1.0}": 2,
        # The last token of each is never computed.
        "iteration_tokens_total_sum": num_prompt - num_hit + num_generated - 5,
        "http_requests_total{handler=/v1/completions,method=POST,status=200}": 3,
    }
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        expected[f"{name}_count"] = 5
    assert {name: grown[name] for name in expected} == expected
    assert grown["iteration_tokens_total_bucket{le=+Inf}"] == grown["iteration_tokens_total_count"]
    parts = ("queue", "prefill", "decode")
    in_parts = sum(grown[f"request_{part}_time_seconds_sum"] for part in parts)
    assert 0 < in_parts <= grown["e2e_request_latency_seconds_sum"]
    first = grown["time_to_first_token_seconds_sum"]
    assert first == pytest.approx(
        grown["request_queue_time_seconds_sum"] + grown["request_prefill_time_seconds_sum"]
    )
    assert grown["inter_token_latency_seconds_sum"] == pytest.approx(
        grown["request_decode_time_seconds_sum"]
    )


def test_every_step_is_in_the_histogram_of_its_size(server: Server) -> None:
    grown = Difference(server.http)
    complete(server, [67] * 69, max_tokens=4)  # steps of 64, 5, 1, 1 and 1 tokens
    grown.take()
    counts = [grown[f"iteration_tokens_total_bucket{{le={b:.1f}}}"] for b in STEP_TOKEN_BOUNDS]
    assert dict(zip(STEP_TOKEN_BOUNDS, counts)) == {
        bound: 3 if bound == 1 else 4 if bound < 64 else 5 for bound in STEP_TOKEN_BOUNDS
    }


def test_a_stop_string_counts_as_one_and_what_follows_it_is_not_counted(server: Server) -> None:
    grown = Difference(server.http)
    body = {"prompt": "abcabc", **OFF, "max_tokens": 50, "temperature": 0}
    text = server.http.post(ROUTE, json=body).json()["choices"][0]["text"]
    reply = server.http.post(ROUTE, json={**body, "stop": text[5:8]}).json()
    grown.take()
    assert grown["request_success_total{finished_reason=stop}"] == 1
    assert grown["request_success_total{finished_reason=abort}"] == 0
    assert grown["generation_tokens_total"] == 50 + reply["usage"]["completion_tokens"]


def test_drafts_are_counted_by_proposer_and_position_as_the_requests_are_told(
    server: Server,
) -> None:
    grown = Difference(server.http)
    reports = []
    lengths = (20, 30, 40)
    for length in lengths:
        body = {"prompt": "one two one two one", "max_tokens": length, "ignore_eos": True}
        reply = server.http.post(ROUTE, json={**body, "speculative": {}, "temperature": 0}).json()
        reports.append(reply["choices"][0]["speculative"]["proposers"]["ngram"])
    grown.take()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        total = sum(report[name] for report in reports)
        assert total > 0
        assert grown[f"spec_decode_{name}_total{{proposer=ngram}}"] == total
        assert f"spec_decode_{name}_total" not in grown  # or a sum over proposers counts it twice
    for name, field in (
        ("num_draft_tokens_per_pos", "num_offered_per_pos"),
        ("num_accepted_tokens_per_pos", "num_accepted_per_pos"),
    ):
        first = sum(report[field][0] for report in reports)
        assert grown[f"spec_decode_{name}_total{{position=0}}"] == first
    assert grown["generation_tokens_total"] == sum(lengths)
    assert grown["inter_token_latency_seconds_count"] == sum(lengths) - len(lengths)


def test_no_series_is_added_however_many_requests_of_whatever_kind_come(server: Server) -> None:
    def send(index: int) -> None:
        body = {"prompt": f"{index} {index}", "max_tokens": 1 + index % 3, "seed": index}
        http = server.http
        assert http.post(ROUTE, json={**body, "user": str(index)}).status_code == 200
        assert http.post(ROUTE, json={**body, f"field{index}": 1}).status_code == 400
        assert http.get(f"/nothing/{index}").status_code == 404
        assert http.get(f"/v1/models/m{index}").status_code == 404
        http.request(f"METHOD{index}", "/health")

    send(0)
    before = scrape(server.http).keys()
    for index in range(1, 8):
        send(index)
    assert scrape(server.http).keys() == before


def test_times_of_a_request_that_waited_for_its_turn_are_where_they_belong(server: Server) -> None:
    grown = Difference(server.http)
    complete(server, [68] * 10, max_tokens=20, n=8)  # four run and four wait
    grown.take()
    assert grown["request_queue_time_seconds_count"] == 8
    # Each of the second four waits for as long as one of the first decodes.
    assert grown["request_queue_time_seconds_sum"] > grown["request_decode_time_seconds_sum"] / 4


class Core:
    """A core process without a model, and what a front end asks it."""

    def __init__(self) -> None:
        command = (sys.executable, "-m", "tests.engine.fake_core")
        self.client = SubprocessClient(fake_config(), command)


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core()
    yield core
    core.client.close()


def test_a_core_that_is_dead_has_its_counts_and_runs_nothing(core: Core) -> None:
    async def run() -> None:
        stats = CoreStats(core)  # type: ignore[arg-type]  # of the engine it asks for the client
        core.client.add([fake_request("r", 1, max_tokens=90)])
        while not (before := await stats.latest())["num_generated_tokens"]:
            assert before["num_running"] + before["num_waiting"] <= 1
        core.client.close()
        after = await stats.latest()
        assert after["num_generated_tokens"] == before["num_generated_tokens"]
        assert after["num_running"] == after["num_waiting"] == after["kv_cache_usage"] == 0

    asyncio.run(run())


def test_a_core_that_is_busy_holds_up_no_scrape_and_is_asked_once(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano.serve.metrics.core_stats.PATIENCE_SECONDS", 0.01)

    async def run() -> None:
        stats = CoreStats(core)  # type: ignore[arg-type]
        while not (known := await stats.latest()):
            pass
        os.kill(core.client.pid, signal.SIGSTOP)
        try:
            for _ in range(5):
                assert await stats.latest() is known
            assert len(asyncio.all_tasks()) == 2  # this one, and the one that asks
        finally:
            os.kill(core.client.pid, signal.SIGCONT)
        while await stats.latest() is known:
            pass

    asyncio.run(run())


COUNT = """
import sys
from nano.engine.messages import EngineReady
from nano.engine.timeline import Timeline
from nano.outputs import FinishReason
from nano.serve.metrics.core_metrics import CoreMetrics
from nano.serve.metrics.request_metrics import Metrics
metrics = Metrics("tiny", 100)
for _ in range(int(sys.argv[1])):
    metrics.ended(Timeline(3, 4, 0.0, finished_time=1.0, finish_reason=FinishReason.STOP))
core = CoreMetrics({"num_running": 2.0}, EngineReady(100, 8, 4, 64, "nano"), "tiny")
print(metrics.render(core).decode())
"""


def test_of_several_front_ends_one_scrape_tells_the_sum(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    told = ""
    for count in ("2", "3"):
        command = [sys.executable, "-c", COUNT, count]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        told = done.stdout
    assert 'nano:request_success_total{finished_reason="stop",model_name="tiny"} 5.0' in told
    assert 'nano:e2e_request_latency_seconds_count{model_name="tiny"} 5.0' in told
    assert 'nano:num_requests_running{model_name="tiny"} 2.0' in told  # the core's, not a sum


class TestLog:
    STATS: Mapping[str, float] = {
        "num_running": 3,
        "num_waiting": 1,
        "kv_cache_usage": 0.125,
        "num_steps": 40,
        "num_generated_tokens": 300,
        "num_prefix_query_tokens": 200,
        "num_prefix_hit_tokens": 50,
    }

    def test_a_line_tells_what_was_done_since_the_last(self) -> None:
        before = {**self.STATS, "num_generated_tokens": 100, "num_prefix_query_tokens": 100}
        assert describe(before, self.STATS, 10.0) == (
            "prompt throughput: 10.0 tokens/s, generation throughput: 20.0 tokens/s, "
            "running: 3 reqs, waiting: 1 reqs, KV cache usage: 12.5%, prefix cache hit rate: 0.0%"
        )

    def test_drafts_are_told_of_if_there_were_any(self) -> None:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        drafts = {f"spec_decode_{name}": count for name, count in zip(names, (10, 40, 30))}
        line = describe({}, {**self.STATS, **drafts}, 10.0)
        assert line is not None
        assert line.endswith(", drafts accepted: 75.0%, mean acceptance length: 4.00")

    def test_a_fresh_core_counts_from_zero(self) -> None:
        before = {**self.STATS, "num_generated_tokens": 10_000}
        line = describe(before, self.STATS, 10.0)
        assert line is not None
        assert "generation throughput: 30.0 tokens/s" in line

    def test_an_idle_engine_and_one_that_never_answered_say_nothing(self) -> None:
        idle = {**self.STATS, "num_running": 0, "num_waiting": 0}
        assert describe(idle, idle, 10.0) is None
        assert describe({}, {}, 10.0) is None

    @pytest.mark.parametrize("is_disabled", [False, True])
    def test_lines_come_while_the_engine_works_unless_they_are_disabled(
        self,
        core: Core,
        is_disabled: bool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(stats_log, "INTERVAL_SECONDS", 0.05)
        monkeypatch.setattr(logging.getLogger("nano"), "propagate", True)
        caplog.set_level(logging.INFO, logger="nano")

        async def run() -> None:
            stats = CoreStats(core)  # type: ignore[arg-type]
            await stats.latest()
            with logging_stats(stats, is_disabled):
                for index in range(200):
                    core.client.add([fake_request(f"r{index}", 1, max_tokens=90)])
                    await asyncio.sleep(0.02)
                    if "generation throughput" in caplog.text or (is_disabled and index > 20):
                        break

        asyncio.run(run())
        assert ("generation throughput" in caplog.text) != is_disabled
