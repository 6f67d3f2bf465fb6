"""CoreMetrics: the core's own numbers, those of `EngineCore.control("stats")`, for Prometheus."""

import re
from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from nano.engine.messages import EngineReady
from nano.engine.step_counts import STEP_TOKEN_BOUNDS

# the core's name -> ours, which is vLLM's, and what it says
GAUGES = {
    "num_running": ("num_requests_running", "Requests being computed."),
    "num_waiting": ("num_requests_waiting", "Requests waiting in the core."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1."),
}
COUNTERS = {
    "num_preemptions": ("num_preemptions", "Requests that lost their KV to others."),
    "num_prefix_query_tokens": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "num_prefix_hit_tokens": ("prefix_cache_hits", "Of these, the tokens that were found."),
}
_KEY = re.compile(r'(?P<name>spec_decode_\w+)\{(?P<label>\w+)="(?P<value>[^"]*)"\}')


class CoreMetrics(Collector):
    """A snapshot. With several proposers the sum over them is the total, as with any label."""

    def __init__(self, stats: Mapping[str, float], ready: EngineReady, model_name: str):
        """`stats` may be empty: the core has never answered."""
        self._stats = stats
        self._ready = ready
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        labels = (self._model_name,)
        for key, (name, help) in GAUGES.items():
            if key in self._stats:
                gauge = GaugeMetricFamily(f"nano:{name}", help, labels=("model_name",))
                gauge.add_metric(labels, self._stats[key])
                yield gauge
        for key, (name, help) in COUNTERS.items():
            if key in self._stats:
                counter = CounterMetricFamily(f"nano:{name}", help, labels=("model_name",))
                counter.add_metric(labels, self._stats[key])
                yield counter
        yield from self._speculation()
        if "num_steps" in self._stats:
            yield self._steps()
        yield self._cache_config()

    def _speculation(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for key, count in self._stats.items():
            found = _KEY.fullmatch(key)  # totals are left out: they would be counted twice
            if found is None:
                continue
            name, label = found["name"], found["label"]
            if name not in families:
                help = "Drafts: how many there were, and what the target made of them."
                families[name] = CounterMetricFamily(
                    f"nano:{name}", help, labels=("model_name", label)
                )
            families[name].add_metric((self._model_name, found["value"]), count)
        yield from families.values()

    def _steps(self) -> Metric:
        stats = self._stats
        buckets = [(str(float(b)), stats[f'num_steps{{le="{b}"}}']) for b in STEP_TOKEN_BOUNDS]
        steps = HistogramMetricFamily(
            "nano:iteration_tokens_total", "Tokens computed in a step.", labels=("model_name",)
        )
        steps.add_metric(
            (self._model_name,),
            [*buckets, ("+Inf", stats["num_steps"])],
            sum_value=stats["num_computed_tokens"],
        )
        return steps

    def _cache_config(self) -> Metric:
        info = GaugeMetricFamily(
            "nano:cache_config_info",
            "What the KV cache is made of.",
            labels=("model_name", "block_size", "num_gpu_blocks"),
        )
        values = (self._model_name, str(self._ready.block_size), str(self._ready.num_blocks))
        info.add_metric(values, 1)
        return info
