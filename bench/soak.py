"""Many mixed steps, for growth, retraces and changed answers: `python -m bench.soak --steps 10000`.

Rounds draw from a fixed catalogue of requests of every kind (short and long prompts, greedy and
sampled, logprobs, penalties), few and many at once, and every answer must be the one that the same
request got the first time, to the bits of its logprobs. Printed at the end: resident memory after
the first tenth and at the end, and whether the compiler was ever imported in this process.
"""

import argparse
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from nano import LLM, SamplingParams
from nano.outputs import RequestOutput

CATALOGUE_SIZE = 100
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


def make_catalogue(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with parameters."""
    catalogue = []
    for _ in range(CATALOGUE_SIZE):
        length = rng.choice([1, 2, 7, 16, 33, 64, 200])
        params = SamplingParams(
            max_tokens=rng.choice([1, 4, 16, 48]),
            ignore_eos=True,
            seed=rng.randrange(99),
            **rng.choice(KINDS),
        )
        catalogue.append(([rng.randrange(5, 250) for _ in range(length)], params))
    return catalogue


def answer_of(output: RequestOutput) -> tuple[Any, ...]:
    completion = output.outputs[0]
    logprobs = completion.logprobs or []
    values = [sorted((i, entry.logprob) for i, entry in row.items()) for row in logprobs]
    return completion.token_ids, completion.finish_reason, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    rng = random.Random(0)
    catalogue = make_catalogue(rng)
    answers: dict[int, tuple[Any, ...]] = {}
    num_repeated = 0
    tenths: list[tuple[int, float, float]] = []  # steps, seconds, resident MiB
    with LLM(args.model, max_model_len=512, startup="compiled-first") as llm:
        started = time.perf_counter()
        while not tenths or tenths[-1][0] < args.steps:
            chosen = rng.choices(range(CATALOGUE_SIZE), k=rng.choice([1, 2, 3, 5, 8, 13, 32]))
            prompts, params = [catalogue[i][0] for i in chosen], [catalogue[i][1] for i in chosen]
            for i, output in zip(
                chosen, llm.generate(prompts, params, use_tqdm=False), strict=True
            ):
                num_repeated += i in answers
                found = answer_of(output)
                assert answers.setdefault(i, found) == found, (
                    f"request {i}: {found}, not {answers[i]}"
                )
            steps = int(llm.stats()["num_steps"])
            if steps >= (len(tenths) + 1) * args.steps // 10:
                tenths.append((steps, time.perf_counter() - started, resident_mib()))
                print(
                    f"{steps:6} steps, {tenths[-1][1]:6.1f} s, {tenths[-1][2]:8.1f} MiB", flush=True
                )
    print(f"{num_repeated} answers were compared with an earlier one: all equal")
    loaded = {"torch._inductor", "torch._dynamo.symbolic_convert"} & sys.modules.keys()
    print(f"resident: {tenths[0][2]:.1f} MiB after a tenth, {tenths[-1][2]:.1f} MiB at the end")
    print(f"compiler modules in this process: {loaded or 'none'}")


if __name__ == "__main__":
    main()
