"""Where a greedy step goes, by rows: `python -m bench.step_time --model MODEL [option=value ...]`.

One request in the middle of its output verifies rows - 1 drafts that are all wrong, at a context of
128: the same work as decoding for one row, and as verification for more. Beside the whole step
stand its parts, each timed alone on the same tensors: linear layers, attention, logits, sampling;
what is left is glue (norms, rotary, residuals, Python). Decoding reads every weight once, so the
share of the read bandwidth says how far the step is from the limit of this machine.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.limits import Limits, measure
from nano.attention.op import forward_context
from nano.config import EngineConfig
from nano.layers.packed_weight import PackedWeight
from nano.resolve import resolve
from nano.sampling_params import SamplingParams
from nano.step import NewRequest, StepPlan
from nano.worker.model_runner import ModelRunner
from nano.worker.worker import Worker

CONTEXT = 128
REQUEST = "timed"


class Stepper:
    """A loaded worker with one request, kept at a context of about `CONTEXT`."""

    def __init__(self, config: EngineConfig) -> None:
        self.worker = Worker(config)
        self.worker.load(show_progress=False)
        self.num_blocks = -(-2 * CONTEXT // config.kv_cache.block_size)
        self.num_steps = 0
        self.num_computed = 0
        self.start()

    def start(self) -> None:
        """Forget the request and compute its prompt anew."""
        request = NewRequest(
            request_id=REQUEST,
            token_ids=[5 + i % 200 for i in range(CONTEXT)],
            num_prompt_tokens=CONTEXT,
            num_computed_tokens=0,
            block_ids=list(range(self.num_blocks)),
            sampling_params=SamplingParams(temperature=0.0, seed=0, max_tokens=512),
        )
        plan = StepPlan(
            step=self.num_steps,
            num_scheduled_tokens={REQUEST: CONTEXT},
            num_computed_tokens={REQUEST: 0},
            new_requests=[request],
            finished_request_ids=[REQUEST] if self.num_steps else [],
        )
        self.worker.execute(plan)
        self.num_computed = CONTEXT

    def step(self, rows: int) -> tuple[float, float]:
        """Seconds of one step of `rows` rows, and of those the seconds of logits and sampling."""
        if self.num_computed + rows > CONTEXT + CONTEXT // 2:
            self.start()
        self.num_steps += 1
        plan = StepPlan(
            step=self.num_steps,
            num_scheduled_tokens={REQUEST: rows},
            num_computed_tokens={REQUEST: self.num_computed},
            draft_token_ids={REQUEST: [0] * (rows - 1)} if rows > 1 else {},
        )
        started = time.perf_counter()
        output = self.worker.execute(plan)
        spent = time.perf_counter() - started
        self.num_computed += len(output.token_ids[0])
        return spent, output.sample_seconds


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def timed(work: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def parts(runner: ModelRunner, rows: int, repeats: int) -> dict[str, float]:
    """Seconds of the kernels of the last step, which had `rows` tokens, each kind alone."""
    model = runner.model
    weights = [module for module in model.modules() if isinstance(module, PackedWeight)]
    body = [w for w in weights if w.num_outputs != model.config.vocab_size]
    head = [w for w in weights if w.num_outputs == model.config.vocab_size]
    inputs = {w.num_inputs: torch.randn(rows, w.num_inputs) for w in weights}
    config = model.config
    q = torch.randn(rows, config.num_heads, config.head_dim)
    k = torch.randn(rows, config.num_kv_heads, config.head_dim)
    out = torch.empty_like(q)
    attend = torch.ops.nano.attention.default
    with torch.inference_mode(), forward_context(runner.context):
        attention = timed(
            lambda: [attend(q, k, k, out, i) for i in range(config.num_layers)], repeats
        )
    with torch.inference_mode():
        return {
            "linear": timed(lambda: [w(inputs[w.num_inputs]) for w in body], repeats),
            "lm_head": timed(lambda: [w(inputs[w.num_inputs]) for w in head], repeats),
            "attention": attention,
        }


def weight_bytes(stepper: Stepper) -> int:
    """Bytes that one step reads of the weights."""
    modules = stepper.worker.runner.model.modules()
    return sum(
        buffer.nbytes
        for module in modules
        if isinstance(module, PackedWeight)
        for buffer in module.buffers()
    )


def report(stepper: Stepper, limits: Limits, rows_list: list[int], repeats: int) -> None:
    num_bytes = weight_bytes(stepper)
    print(f"weights read per step: {num_bytes / 1e6:.0f} MB")
    print(
        "| rows | step ms | x | linear | lm_head | attention | sample | glue | tokens/s | limit |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    first = 0.0
    for rows in rows_list:
        seconds = [stepper.step(rows) for _ in range(repeats)]
        whole = median([step for step, _ in seconds])
        first = first or whole
        part = parts(stepper.worker.runner, rows, repeats)
        sampling = median([sample for _, sample in seconds]) - part["lm_head"]
        glue = whole - sum(part.values()) - sampling
        cells = [f"{value * 1e3:.2f}" for value in (*part.values(), sampling, glue)]
        print(
            f"| {rows} | {whole * 1e3:.2f} | {whole / first:.2f} | {' | '.join(cells)} | "
            f"{rows / whole:.0f} | {limits.bandwidth_share(num_bytes, whole)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6, 7, 8, 16])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("options", nargs="*", help="option=value of the engine")
    args = parser.parse_args()
    options = dict(option.split("=", 1) for option in args.options)
    settings = {
        "max_model_len": 1024,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 512,
        "startup": "compiled-first",
    }
    config = resolve(EngineConfig.from_args({"model": args.model} | settings | options))
    stepper = Stepper(config)
    report(stepper, measure(stepper.worker.device.num_threads), args.rows, args.repeats)


if __name__ == "__main__":
    main()
