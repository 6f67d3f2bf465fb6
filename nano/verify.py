"""`python -m nano.verify --model M --prompts FILE`: is speculation invisible, on this machine?

Runs the same seeded requests with speculation off, one at a time, and then with every proposer at
several lengths, all together, in small chunks and with forced preemption. Reports whether tokens
and log probabilities are identical, or where they first differ and by how much the logits that
decided did. Writes a JSON certificate. The exit status is 1 if tokens differ: on a CPU with nano's
own kernels anywhere, elsewhere where it is not a near-tie.
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano.config import ENGINE_ARGS, EngineConfig, add_engine_arguments
from nano.errors import ConfigError, NanoError
from nano.llm import LLM
from nano.log import setup_logging
from nano.outputs import CompletionOutput
from nano.sampling_params import SamplingParams
from nano.spec.options import WITHOUT_A_SECOND_MODEL, ProposerOptions, SpeculativeOptions

NEAR_TIE = 1e-3  # of logits: what rounding may decide where the order of sums is not fixed
_JUNK = "junk"
_WRONG_EVERY = 7  # tokens of the predictions that are made of the right answers


class Junk:
    """Guesses at random: the hardest test of a rollback."""

    def __init__(self, options: ProposerOptions):
        self._random = random.Random(0)

    def propose(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        # Ids that the text has: of any vocabulary.
        return [int(self._random.choice(token_ids)) for _ in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to run the engine."""

    name: str
    args: dict[str, Any]


@dataclass(slots=True)
class Difference:
    """Where an answer first leaves the one without speculation."""

    prompt: int
    position: int
    token_id: int
    expected_token_id: int
    logit_gap: float | None  # between the two, as far as log probabilities tell


@dataclass(slots=True)
class Check:
    """One way of computing all answers, compared with speculation off."""

    engine: str
    proposer: str  # "" for none
    num_tokens: int
    temperature: float
    num_prompts: int = 0
    num_identical: int = 0  # tokens
    num_identical_logprobs: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_identical(self) -> bool:
        return self.num_identical == self.num_prompts

    def line(self) -> str:
        what = f"{self.proposer} k={self.num_tokens}" if self.proposer else "off"
        verdict = "identical" if self.is_identical else f"{len(self.differences)} DIFFER"
        return (
            f"{self.engine:<12} T={self.temperature:<4g} {what:<18} "
            f"{self.num_identical:>3}/{self.num_prompts} {verdict:<10} "
            f"logprobs {self.num_identical_logprobs}/{self.num_prompts}  "
            f"accepted {self.num_accepted} of {self.num_drafted}  {self.seconds:.1f} s"
        )


class Verifier:
    """Computes and compares. `checks` grows with each comparison."""

    def __init__(self, model: str, engine_args: dict[str, Any], speculative: SpeculativeOptions):
        self._model = model
        self._engine_args = engine_args
        self._speculative = dataclasses.replace(speculative, draft_length="static")
        self.fingerprint = ""
        self.is_exact = False  # whether this engine promises bits
        self.checks: list[Check] = []

    def run(
        self,
        prompts: Sequence[str],
        temperatures: Sequence[float],
        lengths: Sequence[int],
        max_tokens: int,
        engines: Sequence[Engine],
    ) -> Iterator[Check]:
        """Every check, as soon as it is done."""
        params = {
            temperature: [
                SamplingParams(
                    temperature=temperature, seed=seed, max_tokens=max_tokens, logprobs=1
                )
                for seed in range(len(prompts))
            ]
            for temperature in temperatures
        }
        with self._load({}, SpeculativeOptions()) as llm:
            self.fingerprint, self.is_exact = llm.fingerprint, llm.is_exact
            expected = {
                temperature: [
                    llm.generate(prompt, one, use_tqdm=False)[0].outputs[0]
                    for prompt, one in zip(prompts, given)
                ]
                for temperature, given in params.items()
            }
        for engine in engines:
            with self._load(engine.args, self._speculative) as llm:
                for temperature, given in params.items():
                    for proposer, num_tokens in self._variants(lengths):
                        check = Check(engine.name, proposer, num_tokens, temperature)
                        self._check(llm, check, prompts, given, expected[temperature])
                        self.checks.append(check)
                        yield check

    def _load(self, more: dict[str, Any], speculative: SpeculativeOptions) -> LLM:
        args = {**self._engine_args, **more}
        return LLM(self._model, speculative_config=speculative.to_json(), **args)

    def _variants(self, lengths: Sequence[int]) -> Iterator[tuple[str, int]]:
        yield "", 0
        for proposer in self._speculative.proposers:
            for length in lengths:
                if length <= proposer.num_speculative_tokens:
                    yield proposer.name, length

    def _check(
        self,
        llm: LLM,
        check: Check,
        prompts: Sequence[str],
        params: Sequence[SamplingParams],
        expected: Sequence[CompletionOutput],
    ) -> None:
        if check.proposer:
            wishes = {"method": check.proposer, "num_tokens": check.num_tokens}
        else:
            wishes = {"enabled": False}
        started = time.perf_counter()
        outputs = llm.generate(
            list(prompts),
            list(params),
            speculative=wishes,
            prediction=[_nearly(output.token_ids) for output in expected],
            use_tqdm=False,
        )
        check.seconds = time.perf_counter() - started
        for index, (output, wanted) in enumerate(zip(outputs, expected)):
            _compare(check, index, output.outputs[0], wanted)


def _nearly(token_ids: list[int]) -> list[int]:
    """A prediction of an answer that is right for the most part."""
    return [
        token_ids[0] if position % _WRONG_EVERY == _WRONG_EVERY - 1 else token_id
        for position, token_id in enumerate(token_ids)
    ]


def _compare(check: Check, index: int, ours: CompletionOutput, wanted: CompletionOutput) -> None:
    check.num_prompts += 1
    if ours.speculative is not None:
        for stats in ours.speculative.stats.by_proposer.values():
            check.num_drafted += stats.num_draft_tokens
            check.num_accepted += stats.num_accepted_tokens
    if ours.token_ids == wanted.token_ids:
        check.num_identical += 1
        check.num_identical_logprobs += ours.logprobs == wanted.logprobs
        return
    pairs = zip(ours.token_ids, wanted.token_ids)
    position = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
    if position is None:  # one is longer
        position = min(len(ours.token_ids), len(wanted.token_ids))
        check.differences.append(Difference(index, position, -1, -1, None))
        return
    token_id, expected_token_id = ours.token_ids[position], wanted.token_ids[position]
    gap = None
    if ours.logprobs and wanted.logprobs:
        left, right = ours.logprobs[position], wanted.logprobs[position]
        if token_id in right:
            gap = abs(right[expected_token_id].logprob - right[token_id].logprob)
        elif expected_token_id in left:
            gap = abs(left[token_id].logprob - left[expected_token_id].logprob)
    check.differences.append(Difference(index, position, token_id, expected_token_id, gap))


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """One per line: a text, or JSON with `prompt` or `turns` (of which the first is taken).

    Raises `ConfigError` naming the line that is neither.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt: Any = line
        if line.lstrip().startswith("{"):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            prompt = record.get("prompt") or (record.get("turns") or [None])[0]
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{path}, line {number}: no `prompt` and no `turns`")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts[:limit]


def engines_of(chunk_sizes: Sequence[int], num_blocks: int | None) -> list[Engine]:
    """As it comes; each chunk size; and with so few KV blocks that requests are preempted."""
    engines = [Engine("as it is", {})]
    engines += [Engine(f"chunks of {n}", {"long_prefill_token_threshold": n}) for n in chunk_sizes]
    if num_blocks is not None:
        engines.append(Engine("preempting", {"num_gpu_blocks_override": num_blocks}))
    return engines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nano.verify", description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="a text or JSONL file")
    parser.add_argument("--num-prompts", type=int, help="only the first so many")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 4, 8], help="draft lengths")
    parser.add_argument("--chunk-sizes", type=int, nargs="*", default=[16])
    parser.add_argument("--preempting-blocks", type=int, help="KV blocks of a preempting engine")
    parser.add_argument("--output", type=Path, default=Path("certificate.json"))
    add_engine_arguments(parser)
    args = parser.parse_args()
    if args.config:
        parser.error("--config is for the server; give the engine's flags here")
    setup_logging()
    given = {name: getattr(args, name) for name in ENGINE_ARGS}
    try:
        speculative = _speculative(given, max(args.lengths))
        engine_args = {
            name: value
            for name, value in given.items()
            if name != "model" and ENGINE_ARGS[name].section != "speculative"
        }
        verifier = Verifier(args.model or "demo", engine_args, speculative)
        prompts = read_prompts(args.prompts, args.num_prompts)
        engines = engines_of(args.chunk_sizes, args.preempting_blocks)
        for check in verifier.run(
            prompts, args.temperatures, args.lengths, args.max_tokens, engines
        ):
            print(check.line(), flush=True)
    except NanoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _conclude(verifier, args.output)


def _speculative(given: dict[str, Any], most: int) -> SpeculativeOptions:
    """What is asked for, or all that needs no second model; and always junk and predictions."""
    options = EngineConfig.from_args(given).speculative
    proposers = options.proposers or WITHOUT_A_SECOND_MODEL
    junk = ProposerOptions.custom(_JUNK, f"{__name__}:Junk")
    whole = dataclasses.replace(options, proposers=(*proposers, junk)).with_prediction()
    return dataclasses.replace(
        whole,
        proposers=tuple(
            dataclasses.replace(proposer, num_speculative_tokens=most)
            for proposer in whole.proposers
        ),
    )


def _conclude(verifier: Verifier, output: Path) -> int:
    is_exact = verifier.is_exact
    differences = [d for check in verifier.checks for d in check.differences]
    bad = [d for d in differences if is_exact or d.logit_gap is None or d.logit_gap > NEAR_TIE]
    certificate = {
        "fingerprint": verifier.fingerprint,
        "promises_bits": is_exact,
        "verdict": "identical" if not differences else "different" if bad else "near-ties",
        "checks": [dataclasses.asdict(check) for check in verifier.checks],
    }
    output.write_text(json.dumps(certificate, indent=1), encoding="utf-8")
    for difference in differences[:5]:
        print(f"first divergence of prompt {difference.prompt}: {difference}")
    num_equal = sum(check.is_identical for check in verifier.checks)
    print(f"{num_equal} of {len(verifier.checks)} checks identical; certificate: {output}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
