"""A server that is offered more than it can answer: `python -m bench.overload`.

First the peak, from clients that wait for each answer: as many as fit into the server at once. Then
`--factor` times as many requests per second, whether or not the earlier ones are answered. The
server should answer as many as before, not much later than before, and turn the rest away.

A tiny model is served. With `--step-ms` the device is a clock (`bench.step_clock`): at 20 ms the
engine is what is overloaded and nothing else, at 0.5 ms it is the front end. CPU is in shares of a
core; server, core and this client have the machine's cores between them.
"""

import argparse
import json
import os
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.http_overhead import cpu_seconds
from bench.load import draw_fields, settle
from bench.open_loop import Call, keep_open, offer
from bench.step_clock import FILE_VARIABLE, SECONDS_VARIABLE, percentile
from nano.serve.options import ServerOptions
from tests.serve.server import Server
from tests.tiny import make_checkpoint

PATH = "/v1/completions"
WARM_SECONDS = 3.0


@dataclass(slots=True)
class Phase:
    """What became of some calls, and what that took."""

    name: str
    calls: list[Call]
    seconds: float
    cpu: dict[str, float]  # by process

    @property
    def tokens_per_second(self) -> float:
        return sum(call.size for call in self.calls if call.status == 200) / self.seconds

    @property
    def answers_per_second(self) -> float:
        return sum(call.status == 200 for call in self.calls) / self.seconds

    def __str__(self) -> str:
        statuses = Counter(call.status for call in self.calls)
        seconds = [call.seconds for call in self.calls if call.status == 200]
        refused = [call.seconds for call in self.calls if call.status == 429]
        shares = ""
        if seconds:
            shares = " / ".join(f"{percentile(seconds, share):.2f}" for share in (0.5, 0.99, 1.0))
        told = f"; refused in {percentile(refused, 0.99):.2f}" if refused else ""
        cpu = ", ".join(f"{name} {used / self.seconds:.0%}" for name, used in self.cpu.items())
        return (
            f"{self.name}: {len(self.calls) / self.seconds:.1f} requests/s, {dict(statuses)}, "
            f"{self.tokens_per_second:.0f} tokens/s\n"
            f"    seconds of those admitted, p50 / p99 / max: {shares}{told}; CPU: {cpu}"
        )


class Overload:
    """Calls of mixed length to one server. `server` may be any that answers completions."""

    def __init__(self, server: Server):
        assert server.http.base_url.port is not None
        self._server = server
        self._port = server.http.base_url.port
        self._rng = random.Random(3)

    def peak(self, num_clients: int, seconds: float) -> Phase:
        """Clients that wait for each answer."""

        def run() -> list[Call]:
            return keep_open(self._port, num_clients, seconds, self._calls())

        return self._timed(f"{num_clients} clients", run)

    def offered(self, rate: float, seconds: float) -> Phase:
        """Requests that arrive by chance, `rate` per second."""

        def arriving() -> Iterator[Call]:
            due = time.monotonic()
            ends = due + seconds
            for call in self._calls():
                due += self._rng.expovariate(rate)
                if due > ends:
                    return
                call.due = due
                yield call

        return self._timed("offered", lambda: offer(self._port, arriving()))

    def _calls(self) -> Iterator[Call]:
        while True:
            fields = draw_fields(self._rng) | {"ignore_eos": True}
            yield Call(request_bytes(fields), due=0.0, size=fields["max_tokens"])

    def _timed(self, name: str, run: Callable[[], list[Call]]) -> Phase:
        before, began = self._cpu(), time.monotonic()
        calls = run()
        seconds = time.monotonic() - began
        cpu = {name: after - before[name] for name, after in self._cpu().items()}
        return Phase(name, calls, seconds, cpu)

    def _cpu(self) -> dict[str, float]:
        """Seconds so far, by process."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "server": cpu_seconds(self._server.process.pid),
            "core": cpu_seconds(self._server.core_pid),
            "client": own.ru_utime + own.ru_stime,
        }


def request_bytes(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of either part")
    parser.add_argument("--factor", type=float, default=3.0, help="times what can be answered")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--waiting", type=int, help="--max-waiting-requests (default: twice those)")
    default_lag = ServerOptions().max_lag_ms  # tests have another
    parser.add_argument("--max-lag-ms", type=float, default=default_lag, help="as the server's")
    parser.add_argument("--step-ms", type=float, help="of a device that is a clock")
    args = parser.parse_args()
    num_waiting = 2 * args.max_num_seqs if args.waiting is None else args.waiting
    flags = ["--max-num-seqs", str(args.max_num_seqs), "--max-waiting-requests", str(num_waiting)]
    flags += ["--max-lag-ms", str(args.max_lag_ms)]
    with tempfile.TemporaryDirectory() as place:
        folder = make_checkpoint(Path(place) / "tiny", max_position_embeddings=4096)
        if args.step_ms is None:
            server = Server(folder, *flags)
        else:
            os.environ[FILE_VARIABLE] = str(Path(place) / "times")
            os.environ[SECONDS_VARIABLE] = str(args.step_ms / 1000)
            flags += ["--max-model-len", "4096"]
            server = Server(folder, *flags, module="bench.stub_server", core="bench.stub_core")
        try:
            overload = Overload(server)
            num_clients = args.max_num_seqs + num_waiting
            overload.peak(num_clients, WARM_SECONDS)  # first calls set things up
            peak = overload.peak(num_clients, args.seconds)
            print(peak, flush=True)
            offered = overload.offered(args.factor * peak.answers_per_second, args.seconds)
            print(offered)
            print(f"goodput {offered.tokens_per_second / peak.tokens_per_second:.0%} of the peak")
            print(f"after: {settle(server)}")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
