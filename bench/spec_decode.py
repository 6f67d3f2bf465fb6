"""What speculation gains: seconds with it over seconds without, on one engine, in turns.

    python -m bench.spec_decode --model TARGET --task humaneval=HumanEval.jsonl.gz \\
        --task summary=question.jsonl:summarization --task edit \\
        --methods draft_model ngram auto --batch 1 8 --speculative-config '[...]'

A task is `name=file[:category]` (JSONL, perhaps gzipped: `prompt`, or the first of `turns`), or
`edit`: functions of this repository's bench/texts/code.txt to be repeated with a name changed, with
the old text as `prediction`. Methods are the engine's proposers, each alone at its full length, or
`auto`: all of them, chosen as it goes. Every prompt has been computed once before and is in the
prefix cache: what is timed is generation. Runs with and without take turns, `--rounds` times, and
the least seconds of each count. With `--salt` each run has a cache_salt of its own, so that a
proposer that learns from past answers has not seen these. `predicted` is what the engine's own
step-time model makes of the measured acceptance.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from nano import LLM, SamplingParams
from nano.config import ENGINE_ARGS, add_engine_arguments
from nano.outputs import CompletionOutput

OFF = "off"
AUTO = "auto"
CODE = Path(__file__).parent / "texts" / "code.txt"
EDIT = (
    "Rename `{old}` to `{new}` in this Python code. Answer with the whole code, nothing else.\n\n"
)


@dataclass
class Prompt:
    text: str
    prediction: str | None = None


@dataclass
class Measurement:
    """All runs of one method over one task at one batch size."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0  # of requests, not of the engine
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def least(self) -> float:
        return min(self.seconds)

    def count(self, completion: CompletionOutput) -> None:
        self.num_tokens += len(completion.token_ids)
        report = completion.speculative
        if report is not None:
            self.num_steps += report.stats.num_steps
            for stats in report.stats.by_proposer.values():
                self.num_drafted += stats.num_draft_tokens
                self.num_accepted += stats.num_accepted_tokens


def read_task(text: str, limit: int) -> tuple[str, list[Prompt]]:
    name, _, where = text.partition("=")
    if not where:
        return name, list(edit_task())[:limit]
    file, _, category = where.partition(":")
    path = Path(file).expanduser()
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    records = [json.loads(line) for line in data.decode().splitlines() if line.strip()]
    if category:
        records = [record for record in records if record.get("category") == category]
    prompts = [record.get("prompt") or record["turns"][0] for record in records]
    return name, [Prompt(prompt) for prompt in prompts[:limit]]


def edit_task() -> Iterator[Prompt]:
    """Functions of real code, each with a name of its own to be changed."""
    for code in re.split(r"\n(?=(?:    )?def \w+\()", CODE.read_text()):
        name = re.match(r" *def (\w+)\(", code)
        if name and len(code) > 400:
            prompt = EDIT.format(old=name[1], new=f"new_{name[1]}") + code.rstrip()
            yield Prompt(prompt, prediction=code.rstrip())


class Stage:
    """One engine, and every run on it."""

    def __init__(self, llm: LLM, max_tokens: int, temperature: float, has_salts: bool):
        self._llm = llm
        self._has_salts = has_salts
        self._num_runs = 0
        self._params = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
            for seed in range(4096)
        ]
        self._template = llm.get_tokenizer()

    def run(self, prompts: list[Prompt], method: str, batch: int, into: Measurement) -> list:
        wishes = {"method": method} if method not in (OFF, AUTO) else {"enabled": method == AUTO}
        completions, seconds = [], 0.0
        self._num_runs += 1
        salt = f"run-{self._num_runs}" if self._has_salts else None
        if salt is not None:  # its prompts are computed once, as those without salts were
            one = SamplingParams(temperature=0.0, max_tokens=1)
            texts = [self._render(prompt, salt) for prompt in prompts]
            self._llm.generate(texts, one, speculative={"enabled": False}, use_tqdm=False)
        into.num_tokens = into.num_steps = into.num_drafted = into.num_accepted = 0
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            texts = [self._render(prompt, salt) for prompt in group]
            began = perf_counter()
            outputs = self._llm.generate(
                texts,
                self._params[start : start + len(group)],
                speculative=wishes,
                prediction=[prompt.prediction for prompt in group],
                use_tqdm=False,
            )
            seconds += perf_counter() - began
            completions += [output.outputs[0] for output in outputs]
        into.seconds.append(seconds)
        for completion in completions:
            into.count(completion)
        return [completion.token_ids for completion in completions]

    def _render(self, prompt: Prompt, salt: str | None) -> dict:
        messages = [{"role": "user", "content": prompt.text}]
        text = self._template.apply_chat_template(messages, add_generation_prompt=True)
        token_ids = self._template.encode(text, add_special_tokens=False)
        return {"prompt_token_ids": token_ids} | ({} if salt is None else {"cache_salt": salt})

    def predicted(self, method: str, batch: int, found: Measurement) -> float | None:
        """Speed-up that the step-time model gives to the acceptance that was measured."""
        stats = self._llm.stats()
        sizes = [1, 2, 4, 8, 16, 32, 64]
        known = [stats[f"target_seconds_{n}"] for n in sizes]
        length = found.num_tokens / found.num_steps
        drafts = found.num_drafted / found.num_steps
        seconds = float(np.interp(batch * (1 + drafts), sizes, known))
        seconds += drafts * stats.get(f"pass_seconds_{method}", 0.0)
        return length * float(np.interp(batch, sizes, known)) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", action="append", required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--salt", action="store_true")
    add_engine_arguments(parser)
    args = parser.parse_args()
    engine_args = {name: getattr(args, name) for name in ENGINE_ARGS if name != "model"}
    print(
        "| task | batch | method | tokens/s | over off | tokens per step | accepted | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with LLM(args.model or "demo", **engine_args) as llm:
        stage = Stage(llm, args.max_tokens, args.temperature, args.salt)
        for text in args.task:
            task, prompts = read_task(text, args.num_prompts)
            wanted = stage.run(prompts, OFF, 8, Measurement())  # fills the prefix cache
            for batch in args.batch:
                found = {method: Measurement() for method in (OFF, *args.methods)}
                for _ in range(args.rounds):
                    for method, into in found.items():
                        tokens = stage.run(prompts, method, batch, into)
                        assert tokens == wanted, f"{method} changed the tokens of {task}"
                off = found[OFF]
                for method, into in found.items():
                    accepted = into.num_accepted / into.num_drafted if into.num_drafted else 0.0
                    print(
                        f"| {task} | {batch} | {method} | {into.num_tokens / into.least:.1f} "
                        f"| {off.least / into.least:.2f} "
                        f"| {into.num_tokens / into.num_steps:.2f} | {accepted:.2f} "
                        f"| {stage.predicted(method, batch, into):.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
