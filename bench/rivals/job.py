"""The contract that every engine here answers: a job on stdin, one JSON line on stdout."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STARTED = time.perf_counter()


@dataclass
class Job:
    model: str
    threads: int
    options: dict[str, Any] = field(default_factory=dict)
    streams: list[int] = field(default_factory=list)
    prompt_tokens: int = 96
    new_tokens: int = 64
    prefill: list[int] = field(default_factory=list)
    repeats: int = 2

    @classmethod
    def read(cls) -> "Job":
        return cls(**json.loads(sys.stdin.read()))


def prompt(index: int, length: int) -> list[int]:
    """Token ids that every tokenizer of these models has, unlike those of another index."""
    return [1000 + (7919 * (index + 1) + 31 * i * (index % 5 + 1)) % 9000 for i in range(length)]


def measure(job: Job, generate: Callable[[list[list[int]], int], None]) -> None:
    """Run the job with `generate(prompts, new tokens each)` and print the answer."""
    ready = time.perf_counter() - STARTED
    generate([prompt(900, 16)], 4)  # first calls set things up
    answer: dict[str, Any] = {"ready": ready, "decode": {}, "prefill": {}}
    for streams in job.streams:
        prompts = [prompt(i, job.prompt_tokens) for i in range(streams)]
        short, long = [], []
        for _ in range(job.repeats):
            short.append(_seconds(lambda p=prompts: generate(p, 1)))
            long.append(_seconds(lambda p=prompts: generate(p, 1 + job.new_tokens)))
        answer["decode"][streams] = [min(short), min(long)]
    for length in job.prefill:
        fresh = [prompt(1000 + length + repeat, length) for repeat in range(job.repeats)]
        spent = [_seconds(lambda p=ids: generate([p], 1)) for ids in fresh]
        answer["prefill"][length] = min(spent)
    print(json.dumps(answer), flush=True)


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
