"""What a server's /metrics say, for tests."""

import time
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

IDLE = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}


def scrape(http: httpx.Client) -> dict[str, float]:
    """Every sample, without the prefix and the model: `name` or `name{label=value,...}`."""
    reply = http.get("/metrics")
    assert reply.status_code == 200, reply.text
    samples = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = sample.name.removeprefix("nano:")
            samples[f"{name}{{{labels}}}" if labels else name] = sample.value
    return samples


def wait_for(http: httpx.Client, wanted: Mapping[str, float], seconds: float = 120) -> None:
    """Until `scrape` says what is `wanted`."""
    deadline = time.monotonic() + seconds
    while True:
        samples = scrape(http)
        if all(samples.get(name) == value for name, value in wanted.items()):
            return
        assert time.monotonic() < deadline, {name: samples.get(name) for name in wanted}
        time.sleep(0.02)
