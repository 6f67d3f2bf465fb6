"""A server under load, and what is left of it: `python -m bench.load --seconds 180 --streams 500`.

A tiny model is served. Clients stream answers of mixed lengths; one in ten vanishes at a random
point, one in twenty sends nonsense, one in a hundred has a deadline. The tokens of every stream
that is read to its end must be those that `LLM` computes for the same request; of one that a
deadline ends, the first of them. Afterwards nothing may be running or waiting, no block held, and
memory and file descriptors what they were after the first few seconds. For more than a server can
answer see `bench.overload`.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.http_streams import Received, post
from nano import LLM, SamplingParams
from tests.serve.server import Server
from tests.tiny import make_checkpoint

PATH = "/v1/completions"
CATALOGUE_SIZE = 80
SHARE_VANISHING, SHARE_BAD, SHARE_LATE = 0.10, 0.05, 0.01
BYTES_PER_TOKEN = 300  # of a stream, about
SETTLE_SECONDS = 60.0  # for aborts to arrive on a machine that is busy
MAX_SHOWN = 10

BAD_FIELDS: list[dict[str, Any]] = [
    {"temperature": -1},
    {"max_tokens": "many"},
    {"prompt": []},
    {"logit_bias": {"9999": 1}},
    {"no_such_field": 0},
]


@dataclass(slots=True)
class Sample:
    """A request, and the token ids that answer it."""

    fields: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)


def draw_fields(rng: random.Random) -> dict[str, Any]:
    """The body of a request of mixed length."""
    length = rng.choice([1, 3, 10, 40, 120, 300])
    wishes: dict[str, Any] = {
        "max_tokens": rng.choice([1, 5, 20, 60, 150, 300]),
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "ignore_eos": rng.random() < 0.7,
    }
    return {"prompt": [rng.randrange(32, 127) for _ in range(length)], **wishes}


def make_catalogue(folder: Path, rng: random.Random, engine_args: dict[str, Any]) -> list[Sample]:
    """Requests of mixed length, answered offline."""
    samples, params = [], []
    for _ in range(CATALOGUE_SIZE):
        fields = draw_fields(rng)
        samples.append(Sample(fields))
        params.append(SamplingParams(**{k: v for k, v in fields.items() if k != "prompt"}))
    with LLM(folder, **engine_args) as llm:
        prompts = [sample.fields["prompt"] for sample in samples]
        for sample, output in zip(samples, llm.generate(prompts, params, use_tqdm=False)):
            sample.token_ids = output.outputs[0].token_ids
    return samples


class Load:
    """Clients that go on until `seconds` are over. `problems` is what must not have happened."""

    def __init__(self, port: int, catalogue: list[Sample], seed: int):
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.num_tokens = 0
        self._port = port
        self._catalogue = catalogue
        self._rng = random.Random(seed)

    async def run(self, num_streams: int, seconds: float) -> None:
        ends = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < ends:
                await self._request()

        await asyncio.gather(*(client() for _ in range(num_streams)))

    async def _request(self) -> None:
        rng, sample = self._rng, self._rng.choice(self._catalogue)
        fields = {**sample.fields, "stream": True, "return_token_ids": True}
        kind, num_bytes = rng.random(), None
        if kind < SHARE_VANISHING:
            name = "vanished"
            num_bytes = rng.randrange(BYTES_PER_TOKEN * (1 + len(sample.token_ids)))
        elif kind < SHARE_VANISHING + SHARE_BAD:
            name = "bad"
            fields |= rng.choice(BAD_FIELDS)
        elif kind < SHARE_VANISHING + SHARE_BAD + SHARE_LATE:
            name = "late"
            fields["timeout_ms"] = rng.choice([1, 20, 300])
        else:
            name = "whole"
        try:
            received = await post(self._port, PATH, json.dumps(fields).encode(), num_bytes)
        except OSError as error:
            self.problems.append(f"{name}: {error}")
            return
        if received is None:
            self.outcomes["vanished"] += 1
            return
        if name == "vanished":
            name = "whole"  # the answer was shorter than thought
        if name == "late" and received.is_done and received.error is None:
            name = "whole"  # in time after all
        problem = self._problem(name, sample, received)
        self.outcomes[name] += 1
        self.num_tokens += len(received.token_ids)
        if problem is not None:
            self.problems.append(f"{name}: {problem}; asked {fields}")

    def _problem(self, name: str, sample: Sample, received: Received) -> str | None:
        if name == "bad":
            return None if received.status == 400 else f"status {received.status}"
        if name == "late" and received.status in (408, 429):
            return None
        if received.status != 200:
            return f"status {received.status}: {received.body[:300]!r}"
        if name == "late":
            if received.error is None:
                return "neither an end nor an error"
            expected = sample.token_ids[: len(received.token_ids)]
        else:
            if received.error is not None or not received.is_done:
                return f"a stream without an end: {received.error}"
            expected = sample.token_ids
        if received.token_ids != expected:
            return f"tokens {received.token_ids}, not {expected}"
        return None


@dataclass(slots=True)
class Remains:
    """What a server holds."""

    num_files: int
    mebibytes: dict[str, float]  # resident, by process
    gauges: dict[str, float]

    @classmethod
    def of(cls, server: Server) -> "Remains":
        pids = {"server": server.process.pid, "core": server.core_pid}
        num_files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids.values())
        mebibytes = {}
        for name, pid in pids.items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            mebibytes[name] = pages * resource.getpagesize() / 2**20
        return cls(num_files, mebibytes, read_gauges(server))

    @property
    def is_idle(self) -> bool:
        return not any(self.gauges.values())

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size:.1f} MiB" for name, size in self.mebibytes.items())
        gauges = ", ".join(f"{name} {value:g}" for name, value in self.gauges.items())
        return f"{self.num_files} file descriptors, {sizes}; {gauges}"


def read_gauges(server: Server) -> dict[str, float]:
    """What is in use now, by the server's own account."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    gauges: dict[str, float] = {}
    for line in server.http.get("/metrics").text.splitlines():
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0].removeprefix("nano:")
        if name in names:
            gauges[name] = gauges.get(name, 0.0) + float(value)
    assert set(gauges) == set(names), gauges
    return gauges


def settle(server: Server) -> Remains:
    """The remains once nothing is running, or at the end of patience."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not (remains := Remains.of(server)).is_idle and time.monotonic() < deadline:
        time.sleep(0.05)
    return remains


def run_load(
    server: Server, catalogue: list[Sample], num_streams: int, seconds: float, warm_seconds: float
) -> tuple[Load, Remains, Remains]:
    """(the load, what was there before, what is there after)."""
    port = server.http.base_url.port
    assert port is not None
    asyncio.run(Load(port, catalogue, seed=1).run(num_streams, warm_seconds))
    before = settle(server)
    load = Load(port, catalogue, seed=2)
    asyncio.run(load.run(num_streams, seconds))
    return load, before, settle(server)


def print_load(load: Load, before: Remains, after: Remains, seconds: float) -> None:
    print(f"{dict(load.outcomes)}, {load.num_tokens / seconds:.0f} tokens/s read to the end")
    print(f"before: {before}\nafter:  {after}")
    print(f"{len(load.problems)} problems", *load.problems[:MAX_SHOWN], sep="\n  ")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    args = parser.parse_args()
    flags = ["--max-num-seqs", str(args.max_num_seqs)]
    with tempfile.TemporaryDirectory() as place:
        folder = make_checkpoint(Path(place) / "tiny", max_position_embeddings=4096)
        catalogue = make_catalogue(folder, random.Random(0), {})
        server = Server(folder, *flags)
        try:
            warm_seconds = min(10.0, args.seconds / 4)
            found = run_load(server, catalogue, args.streams, args.seconds, warm_seconds)
            print_load(*found, args.seconds)
            load, _, after = found
            return 1 if load.problems or not after.is_idle else 0
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
