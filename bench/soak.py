"""Many mixed steps, looking for growth and retraces: `python -m bench.soak --steps 10000`.

Rounds of requests of every kind (short and long prompts, greedy and sampled, logprobs, penalties,
few and many at once) run on compiled pieces. Printed at the end: resident memory after the first
tenth and at the end, and whether the compiler was ever imported in this process.
"""

import argparse
import random
import resource
import sys
import time
from pathlib import Path

from nano import LLM, SamplingParams

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run_round(llm: LLM, rng: random.Random) -> None:
    count = rng.choice([1, 2, 3, 5, 8, 13, 32])
    prompts, params = [], []
    for _ in range(count):
        length = rng.choice([1, 2, 7, 16, 33, 64, 200])
        prompts.append([rng.randrange(5, 250) for _ in range(length)])
        kind = rng.choice(KINDS)
        params.append(
            SamplingParams(
                max_tokens=rng.choice([1, 4, 16, 48]),
                ignore_eos=True,
                seed=rng.randrange(99),
                **kind,
            )
        )
    llm.generate(prompts, params, use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    rng = random.Random(0)
    tenths: list[tuple[int, float, float]] = []  # steps, seconds, resident MiB
    with LLM(args.model, max_model_len=512, startup="compiled-first") as llm:
        started = time.perf_counter()
        while not tenths or tenths[-1][0] < args.steps:
            run_round(llm, rng)
            steps = int(llm.stats()["num_steps"])
            if steps >= (len(tenths) + 1) * args.steps // 10:
                tenths.append((steps, time.perf_counter() - started, resident_mib()))
                print(
                    f"{steps:6} steps, {tenths[-1][1]:6.1f} s, {tenths[-1][2]:8.1f} MiB", flush=True
                )
    loaded = {"torch._inductor", "torch._dynamo.symbolic_convert"} & sys.modules.keys()
    print(f"resident: {tenths[0][2]:.1f} MiB after a tenth, {tenths[-1][2]:.1f} MiB at the end")
    print(f"compiler modules in this process: {loaded or 'none'}")


if __name__ == "__main__":
    main()
