"""How the draft policy settles on a real engine while the load steps up and down.

    python -m bench.draft_lengths --model TARGET --prompts FILE --speculative-config '[...]' \\
        --output docs/draft_lengths.png

One stream, then eight, then one again, each for `--num-tokens` tokens a stream. Every step is
recorded: requests, drafts verified per request, tokens per second. Prints a summary per phase and
draws a picture if matplotlib is importable; it is no dependency.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from nano import LLM, SamplingParams
from nano.config import ENGINE_ARGS, add_engine_arguments
from nano.engine.client import InProcessClient
from nano.step import StepOutput, StepPlan
from nano.verify import read_prompts

PHASES = (1, 8, 1)


@dataclass
class Step:
    num_requests: int
    num_drafts: int
    num_tokens: int
    seconds: float


def record(llm: LLM) -> list[Step]:
    """A list that every step of the engine is added to, from now on."""
    steps: list[Step] = []
    client = llm._client
    assert isinstance(client, InProcessClient)
    planner = client._core._drafts
    observe = planner.observe_step

    def observe_and_record(
        plan: StepPlan, output: StepOutput, execute_seconds: float, other_seconds: float
    ) -> None:
        steps.append(
            Step(
                num_requests=len(plan.num_scheduled_tokens),
                num_drafts=sum(map(len, plan.draft_token_ids.values())),
                num_tokens=sum(map(len, output.token_ids)),
                seconds=execute_seconds + other_seconds,
            )
        )
        observe(plan, output, execute_seconds, other_seconds)

    planner.observe_step = observe_and_record  # type: ignore[method-assign]
    return steps


def summarise(name: str, steps: list[Step]) -> None:
    seconds = sum(step.seconds for step in steps)
    num_rows = sum(step.num_requests for step in steps)
    print(
        f"| {name} | {len(steps)} | {sum(s.num_drafts for s in steps) / num_rows:.2f} "
        f"| {sum(s.num_tokens for s in steps) / num_rows:.2f} "
        f"| {sum(s.num_tokens for s in steps) / seconds:.1f} |",
        flush=True,
    )


def draw(steps: list[Step], path: Path, title: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    window = 8
    seconds, clock = [], 0.0
    for step in steps:
        clock += step.seconds
        seconds.append(clock)
    rates = [
        sum(s.num_tokens for s in steps[max(0, i - window) : i + 1])
        / sum(s.seconds for s in steps[max(0, i - window) : i + 1])
        for i in range(len(steps))
    ]
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(9, 6))
    axes[0].step(seconds, [s.num_requests for s in steps], where="pre", color="black")
    axes[0].set_ylabel("requests")
    axes[1].plot(seconds, [s.num_drafts / s.num_requests for s in steps], ".", markersize=3)
    axes[1].set_ylabel("drafts per request")
    axes[2].plot(seconds, rates)
    axes[2].set_ylabel(f"tokens/s, {window} steps")
    axes[2].set_xlabel("seconds")
    axes[0].set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"drawn to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, required=True)
    add_engine_arguments(parser)
    args = parser.parse_args()
    engine_args = {name: getattr(args, name) for name in ENGINE_ARGS if name != "model"}
    prompts = iter(read_prompts(args.prompts))
    params = SamplingParams(temperature=0.0, max_tokens=args.num_tokens, ignore_eos=True)
    print(
        "| streams | steps | drafts per request and step | tokens per request and step | tokens/s |"
    )
    print("|---|---|---|---|---|")
    with LLM(args.model or "demo", **engine_args) as llm:
        steps = record(llm)
        for num_streams in PHASES:
            start = len(steps)
            for _ in range(3 if num_streams == 1 else 1):
                texts = [next(prompts) for _ in range(num_streams)]
                llm.generate(texts, params, use_tqdm=False)
            summarise(str(num_streams), steps[start:])
    draw(steps, args.output, Path(args.model or "demo").name)


if __name__ == "__main__":
    main()
