"""Metrics: what a front end counts and measures, for Prometheus. Names are vLLM's, with `nano:`.

What is told here per completion, vLLM tells per request: each of `n` completions is a request of
the engine. No series grows with requests: labels are the model's name and words of small sets.
Several front ends of one engine count in files of the folder PROMETHEUS_MULTIPROC_DIR, and whoever
is asked answers for all; the variable must be set before this module is imported.
"""

import os

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from nano.engine.timeline import Timeline
from nano.outputs import FinishReason
from nano.serve.metrics.core_metrics import CoreMetrics

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's own variable
# When each series began: twice as many series, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

# vLLM's buckets, so that dashboards and alerts carry over.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CHOICES = (1, 2, 5, 10, 20)
METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"}


class Metrics:
    """Counts from the moment it is made. A `RequestObserver`; for the event loop only."""

    def __init__(self, model_name: str, max_model_len: int):
        self._model_name = model_name
        self._registry = CollectorRegistry()
        lengths = _lengths(max_model_len)

        self._rejections = self._counter(
            "admission_rejections", "Calls turned away by a limit of the queue.", "reason"
        )
        self._http_requests = self._counter(
            "http_requests", "Answers by route, method and status.", "handler", "method", "status"
        )
        self._ended = self._counter(
            "request_success", "Completions that ended, for whatever reason.", "finished_reason"
        )
        self._prompt_tokens_by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens, computed or read from the cache.", "source"
        )
        self._prompt_tokens = self._plain_counter("prompt_tokens", "Prompt tokens.")
        self._cached_tokens = self._plain_counter(
            "prompt_tokens_cached", "Prompt tokens read from the prefix cache."
        )
        self._generation_tokens = self._plain_counter("generation_tokens", "Generated tokens.")

        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_SECONDS
        )
        self._token = self._histogram(
            "inter_token_latency_seconds",
            "Between two tokens; those of one step share the time since the step before.",
            TOKEN_SECONDS,
        )
        self._mean_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens of a completion.",
            TOKEN_SECONDS,
        )
        self._whole, self._queue, self._prefill, self._decode, self._inference = (
            self._histogram(name, help, REQUEST_SECONDS)
            for name, help in (
                ("e2e_request_latency_seconds", "From arrival to the end."),
                ("request_queue_time_seconds", "From arrival to the first step."),
                ("request_prefill_time_seconds", "From the first step to the first token."),
                ("request_decode_time_seconds", "From the first token to the last."),
                ("request_inference_time_seconds", "From the first step to the last token."),
            )
        )
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a completion.", lengths
        )
        self._computed_length = self._histogram(
            "request_prefill_kv_computed_tokens", "Of these, not read from the cache.", lengths
        )
        self._output_length = self._histogram(
            "request_generation_tokens", "Tokens of a completion.", lengths
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of a request.", lengths
        )
        self._n = self._histogram("request_params_n", "n of a request.", CHOICES)
        for reason in FinishReason:  # so that a rate has a zero to start from
            self._ended.labels(model_name, reason.value)

    def reject(self, reason: str) -> None:
        """Count a call that the queue's limits turned away."""
        self._rejections.labels(self._model_name, reason).inc()

    def answer(self, route: str | None, method: str, status: int) -> None:
        """Count an HTTP answer. `route` is a template, not the path; None where there is none."""
        method = method if method in METHODS else "other"
        self._http_requests.labels(self._model_name, route or "none", method, str(status)).inc()

    def accept(self, n: int, max_tokens: int | None) -> None:
        """Count a request that goes to the engine."""
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def entered(self, timeline: Timeline) -> None:
        pass

    def begun(self, timeline: Timeline) -> None:
        assert timeline.begun_time is not None
        self._queue.observe(timeline.begun_time - timeline.arrival_time)

    def advanced(self, timeline: Timeline, num_tokens: int, seconds: float) -> None:
        self._generation_tokens.inc(num_tokens)
        if timeline.num_tokens > num_tokens:
            for _ in range(num_tokens):
                self._token.observe(seconds / num_tokens)
            return
        self._first_token.observe(seconds)
        for _ in range(num_tokens - 1):  # they came with the first
            self._token.observe(0.0)
        num_cached = timeline.num_cached_tokens
        num_computed = timeline.num_prompt_tokens - num_cached
        self._prompt_tokens.inc(timeline.num_prompt_tokens)
        self._cached_tokens.inc(num_cached)
        self._computed_length.observe(num_computed)
        for source, count in (("local_compute", num_computed), ("local_cache_hit", num_cached)):
            self._prompt_tokens_by_source.labels(self._model_name, source).inc(count)

    def ended(self, timeline: Timeline) -> None:
        assert timeline.finished_time is not None
        assert timeline.finish_reason is not None
        self._ended.labels(self._model_name, timeline.finish_reason.value).inc()
        self._whole.observe(timeline.finished_time - timeline.arrival_time)
        first, last = timeline.first_token_time, timeline.last_token_time
        if first is None or last is None or timeline.begun_time is None:
            return
        self._prompt_length.observe(timeline.num_prompt_tokens)
        self._output_length.observe(timeline.num_tokens)
        self._prefill.observe(first - timeline.begun_time)
        self._decode.observe(last - first)
        self._inference.observe(last - timeline.begun_time)
        if timeline.num_tokens > 1:
            self._mean_token.observe((last - first) / (timeline.num_tokens - 1))

    def render(self, core: CoreMetrics) -> bytes:
        """All that is known, with the core's own numbers, in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(core)
        if SHARED_FOLDER in os.environ:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return generate_latest(registry)
        return generate_latest(self._registry) + generate_latest(registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"nano:{name}", help, ("model_name", *labels), registry=self._registry)

    def _plain_counter(self, name: str, help: str) -> Counter:
        return self._counter(name, help).labels(self._model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"nano:{name}", help, ("model_name",), registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model_name)


def _lengths(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to `longest`."""
    bounds = (digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5))
    return tuple(float(bound) for bound in bounds if bound <= longest)
