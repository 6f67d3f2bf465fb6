"""A machine with known costs, and proposers of known accuracy, for the draft policy to find out.

    python -m tests.scheduler.draft_simulator [PNG]

prints how the policy fares in each scenario, and draws it if matplotlib is there. Seconds and
tokens that are compared are the true expected ones of the decisions taken; what the policy is
told has noise and outliers in it.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from nano.scheduler.draft_candidate import DraftCandidate
from nano.scheduler.draft_policy import DraftPolicy
from nano.scheduler.step_time import StepLoad, StepTiming
from nano.speculation import ProposerInfo
from nano.step import DraftRequest

Curve = Callable[[float], float]


def flat_then_linear(num_tokens: float) -> float:
    """Bound by memory up to eight tokens, as a small model on a CPU is."""
    return 0.010 * max(1 + 0.03 * (num_tokens - 1), 0.15 * num_tokens)


def linear(num_tokens: float) -> float:
    return 0.002 + 0.004 * num_tokens


def stepwise(num_tokens: float) -> float:
    """In tiles of eight tokens."""
    return 0.004 + 0.006 * -(-num_tokens // 8)


def flat(num_tokens: float) -> float:
    """A machine that has far more arithmetic than memory."""
    return 0.010 + 0.00002 * num_tokens


@dataclass(frozen=True)
class Guesser:
    """A proposer as it really is. `accuracy` is of a position, if those before it were right."""

    info: ProposerInfo
    accuracy: Callable[[str, int, int], float]  # (request id, step, position from 0)
    chance: float = 1.0  # that it has a guess at all
    pass_curve: Curve = flat_then_linear  # of a model, at pass_share of these seconds
    pass_share: float = 0.0

    def survivals(self, request_id: str, step: int, num_tokens: int) -> Iterator[float]:
        survival = 1.0
        for position in range(num_tokens):
            survival *= self.accuracy(request_id, step, position)
            yield survival


def text(name: str, accuracy, num_tokens: int = 4, chance: float = 1.0) -> Guesser:
    return Guesser(ProposerInfo(name, num_tokens, is_free=True), accuracy, chance)


def model(name: str, accuracy, pass_share: float, num_tokens: int = 4, told: float = 1.0):
    """A model whose pass takes `pass_share` of the target's step; `told` times that is believed."""
    info = ProposerInfo(name, num_tokens, is_free=False, pass_seconds=0.010 * pass_share * told)
    return Guesser(info, accuracy, pass_share=pass_share)


def always(accuracy: float, first: float | None = None):
    return lambda request_id, step, position: accuracy if position or first is None else first


@dataclass(frozen=True)
class Scenario:
    name: str
    curve: Curve
    guessers: tuple[Guesser, ...]
    num_requests: Callable[[int], int] = lambda step: 1
    num_steps: int = 2000
    measured: Curve | None = None  # what was measured at the start, if it is not the curve
    hidden_seconds: float = 0.0  # of each verified draft, in none of the terms of the model
    noise: float = 0.03
    outlier_rate: float = 0.01
    lifetime: int = 500  # steps of a request


def decoding(num_requests: int) -> StepLoad:
    """Without a prompt."""
    return StepLoad(num_requests, num_requests)


@dataclass
class Result:
    tokens: list[float] = field(default_factory=list)  # expected, per step
    seconds: list[float] = field(default_factory=list)
    verified: list[dict[str, int]] = field(default_factory=list)
    asked: list[dict[str, tuple[DraftRequest, ...]]] = field(default_factory=list)
    num_requests: list[int] = field(default_factory=list)

    def rate(self, start: int = 0, stop: int | None = None) -> float:
        return sum(self.tokens[start:stop]) / sum(self.seconds[start:stop])


class Off:
    """Never asks for a draft."""

    def choose(self, candidates, load):
        return {}

    def trim(self, drafts, load):
        return dict.fromkeys(drafts, 0)

    def observe(self, *args): ...

    observe_unverified = observe_step = forget = observe


class Fixed(Off):
    """Asks `lengths(request id)` = (proposer, number), ..., and verifies it all."""

    def __init__(self, lengths: Callable[[str], Sequence[tuple[str, int]]]):
        self.lengths = lengths

    def choose(self, candidates, load):
        return {
            one.request_id: tuple(
                DraftRequest(*ask) for ask in self.lengths(one.request_id) if ask[1]
            )
            for one in candidates
        }

    def trim(self, drafts, load):
        return {request_id: number for request_id, (_, number) in drafts.items()}


def make_policy(scenario: Scenario, **options) -> DraftPolicy:
    measured = scenario.measured or scenario.curve
    points = [(n, measured(n)) for n in (1, 2, 4, 8, 9, 16, 32, 64)]
    return DraftPolicy([one.info for one in scenario.guessers], points, **options)


def simulate(scenario: Scenario, policy, seed: int = 0, cap: int = 16) -> Result:
    """Run `policy` through `scenario`. Requests are named by their slot and their turn in it."""
    rng = random.Random(seed)
    guessers = {one.info.name: one for one in scenario.guessers}
    names = tuple(guessers)
    result = Result()
    drafts: dict[str, tuple[str, int, int]] = {}  # proposer, number, how many are right
    running: list[str] = []
    for step in range(scenario.num_steps):
        load = scenario.num_requests(step)
        now = [f"{slot}.{(step + 37 * slot) // scenario.lifetime}" for slot in range(load)]
        for request_id in running:
            if request_id not in now:
                policy.forget(request_id)
                drafts.pop(request_id, None)
        running = now

        offered = {one: (draft[0], draft[1]) for one, draft in drafts.items()}
        verified = policy.trim(offered, decoding(load))
        candidates = [DraftCandidate(one, names, cap) for one in running]
        asked = policy.choose(candidates, decoding(load))

        num_verified = sum(verified.values())
        tokens = float(load)
        for request_id, number in verified.items():
            guesser = guessers[drafts[request_id][0]]
            tokens += sum(guesser.survivals(request_id, step - 1, number))
        target = scenario.curve(load + num_verified)
        new_drafts, num_runs = {}, {}
        for request_id, asks in asked.items():
            for ask in asks:
                guesser = guessers[ask.proposer]
                if rng.random() >= guesser.chance:
                    continue
                right = 0
                while right < ask.num_tokens and rng.random() < guesser.accuracy(
                    request_id, step, right
                ):
                    right += 1
                new_drafts[request_id] = ask.proposer, ask.num_tokens, right
                if not guesser.info.is_free:
                    for index in range(ask.num_tokens):
                        key = ask.proposer, index
                        num_runs[key] = num_runs.get(key, 0) + 1
                break
        draft_seconds = sum(
            guessers[name].pass_share * guessers[name].pass_curve(number)
            for (name, _), number in num_runs.items()
        )
        other = 0.0003 + scenario.hidden_seconds * num_verified
        result.tokens.append(tokens)
        result.seconds.append(target + draft_seconds + other)
        result.verified.append(dict(verified))
        result.asked.append(asked)
        result.num_requests.append(load)

        num_new = load
        for request_id, number in verified.items():
            name, _, right = drafts[request_id]
            if number:
                policy.observe(request_id, name, number, min(number, right))
                num_new += min(number, right)
            else:
                policy.observe_unverified(request_id, name, min(right, 1), 1)
        slow = 10.0 if rng.random() < scenario.outlier_rate else 1.0
        noise = [slow * rng.gauss(1.0, scenario.noise) for _ in range(3)]
        policy.observe_step(
            StepTiming(
                num_tokens=load + num_verified,
                target_seconds=target * noise[0],
                draft_seconds=draft_seconds * noise[1],
                num_draft_passes=len(num_runs),
                num_draft_pass_tokens=sum(num_runs.values()),
                other_seconds=other * noise[2],
            ),
            num_new,
        )
        drafts = new_drafts
    return result


def oracle(scenario: Scenario) -> float:
    """Most expected tokens per second that any fixed lengths give: brute force over a proposer and
    a length for each request, or for each half of them if they are many. Always-guessing proposers,
    and accuracies that do not change."""
    load = scenario.num_requests(0)
    requests = [f"{slot}.0" for slot in range(load)]
    groups = [[one] for one in requests] if load <= 3 else [requests[::2], requests[1::2]]
    choices = [("", 0)] + [
        (one.info.name, number)
        for one in scenario.guessers
        for number in range(1, one.info.num_tokens + 1)
    ]
    best = 0.0
    for chosen in product(choices, repeat=len(groups)):
        ask_of = {one: ask for group, ask in zip(groups, chosen) for one in group}
        once = replace(scenario, num_steps=2, noise=0.0, outlier_rate=0.0, lifetime=10**9)
        result = simulate(once, Fixed(lambda one, ask_of=ask_of: [ask_of.get(one, ("", 0))]))
        best = max(best, result.rate(1))
    return best


def half(good: float, bad: float):
    """Requests in even slots are guessed well, the others badly."""
    return lambda request_id, step, position: (
        good if int(request_id.split(".")[0]) % 2 == 0 else bad
    )


def changing(before: float, after: float, at: int):
    return lambda request_id, step, position: before if step < at else after


def bursts(step: int) -> int:
    """1, then 32, then 1 request, 500 steps each."""
    return 32 if 500 <= step < 1000 else 1


def steady(num_requests: int):
    return lambda step: num_requests


STATIONARY = [
    Scenario(f"{name}, {what}, {load} running", curve, guessers, steady(load))
    for name, curve in (
        ("flat", flat),
        ("flat then linear", flat_then_linear),
        ("linear", linear),
        ("stepwise", stepwise),
    )
    for load in (1, 3, 32)
    for what, guessers in (
        ("text 0.7", (text("text", always(0.7)),)),
        ("text 0.9 and 0.1", (text("text", half(0.9, 0.1)),)),
        ("model 0.8 at 0.1", (model("model", always(0.8), 0.1),)),
        ("model 0.9 and 0.3 at 0.2", (model("model", half(0.9, 0.3), 0.2),)),
        ("two models", (model("big", always(0.9), 0.3), model("small", always(0.7), 0.1))),
        ("junk text, model 0.8", (text("text", always(0.05)), model("model", always(0.8), 0.1))),
    )
]

USELESS = [
    Scenario(f"{name}, {what}, {load} running", curve, guessers, steady(load), measured=measured)
    for name, curve, measured in (
        ("flat then linear", flat_then_linear, None),
        ("linear", linear, None),
        ("linear, thought flat", linear, lambda num_tokens: 0.006),
        ("flat then linear, one point", flat_then_linear, lambda num_tokens: 0.010),
    )
    for load in (1, 8, 32)
    for what, guessers in (
        ("text always wrong", (text("text", always(0.0)),)),
        ("model always wrong", (model("model", always(0.0), 0.2),)),
        ("model right but slow", (model("model", always(0.9), 1.5),)),
        ("model thought fast", (model("model", always(0.6), 1.0, told=0.05),)),
    )
]


def table() -> Iterator[tuple[str, float, float]]:
    """(scenario, rate over that of no drafts, rate over the oracle's or nan)."""
    for scenario in STATIONARY + USELESS:
        result = simulate(scenario, make_policy(scenario))
        off = simulate(scenario, Off()).rate()
        best = oracle(scenario) if scenario in STATIONARY else float("nan")
        yield scenario.name, result.rate() / off, result.rate() / best


def draw(path: str) -> None:
    """The load steps from 1 to 32 requests and back: tokens per second, and drafts per request."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no matplotlib: nothing drawn")
        return
    scenario = Scenario(
        "bursts", flat_then_linear, (text("text", always(0.7)),), bursts, num_steps=1500
    )
    figure, (rates, lengths) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6))
    policies = {
        "policy": make_policy(scenario),
        "off": Off(),
        "always 4": Fixed(lambda request_id: [("text", 4)]),
    }
    for label, policy in policies.items():
        result = simulate(scenario, policy)
        rates.plot([a / b for a, b in zip(result.tokens, result.seconds)], label=label, lw=1)
        drafts = [sum(step.values()) for step in result.verified]
        lengths.plot([n / load for n, load in zip(drafts, result.num_requests)], label=label, lw=1)
    rates.set_ylabel("expected tokens per second")
    lengths.set_ylabel("drafts per request")
    lengths.set_xlabel("step; 1, 32 and 1 requests")
    rates.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    for name, over_off, over_oracle in table():
        print(f"{name:55s} {over_off:6.3f} of off {over_oracle:6.3f} of the oracle")
    if len(sys.argv) > 1:
        draw(sys.argv[1])
