"""AcceptanceRule: how many drafts are kept, and what the token behind them is drawn from.

p is the target's distribution at a row and q what the draft there was drawn from, both after all
edits, temperature and truncation. x_1 .. x_k are drafts of one request, p_1 .. p_{k+1} and q_1 ..
q_k their rows, u_1 .. u_k uniforms. A rule keeps tau drafts; the token behind them comes from

    p_{k+1}                                      tau = k
    max(scale * p_{tau+1} - q_{tau+1}, 0)        tau < k, normalised

The match rule is not here: it compares tokens and needs neither p nor q (`sampler.accept`).

Precision: p and q are float32 and come out of one function, so that q = p means equal bits. All
arithmetic on them is float64. Rounding enters before (a row of float32 probabilities sums to one
within about 1e-7) and after (the residual is drawn from as float32 logits, with float32 noise, as
every token is), and moves the output by no more than that in total variation.

Noise: a draft, a uniform and a final draw each have a domain of their own, apart from the target's
noise. What keys them within it is the rule's business, see `noise_keys`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nano.model_input.request_states import RequestStates
from nano.sampling.noise import NoiseDomain, domain_seeds

_CACHED_VALUES = 2**17  # float64 numbers that a core's cache holds beside others


@dataclass(slots=True)
class DraftedRequests:
    """What is judged: N requests of at most K drafts. Matrices are padded on the right.

    Request n has logits rows p_start[n] .. p_start[n] + num_drafts[n] of `p`, and one draft less
    of `q`, from q_start[n] on. Rules that do not look at probabilities get p and q of no rows.
    """

    num_drafts: np.ndarray  # [N] int64, at least 1
    token_ids: np.ndarray  # [N, K] int64
    uniforms: np.ndarray  # [N, K] float64 in (0, 1)
    p: Tensor  # [D + N, V] float32, where D is the sum of num_drafts
    q: Tensor  # [D, V] float32
    is_draft: np.ndarray = field(init=False)  # [N, K] bool: False is padding
    p_start: np.ndarray = field(init=False)  # [N] int64
    q_start: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        place = np.arange(self.token_ids.shape[1])
        self.is_draft = place < self.num_drafts[:, None]
        self.q_start = self.num_drafts.cumsum() - self.num_drafts
        self.p_start = self.q_start + np.arange(len(self.num_drafts))

    def probs_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """p(x) and q(x) of every draft: [N, K] float64 both, 0 in the padding."""
        n, i = self.is_draft.nonzero()
        found = []
        for probs, start in ((self.p, self.p_start), (self.q, self.q_start)):
            matrix = np.zeros(self.token_ids.shape)
            matrix[n, i] = probs[start[n] + i, self.token_ids[n, i]].cpu().numpy()
            found.append(matrix)
        return found[0], found[1]

    def residual(self, n: np.ndarray, i: np.ndarray, scale: np.ndarray) -> Tensor:
        """max(scale * p_{i+1} - q_{i+1}, 0) of requests n: [M, V] float64.

        n, i: [M] int64, i < num_drafts[n]; scale: [M] float64.
        """
        p, q = self.p[self.p_start[n] + i], self.q[self.q_start[n] + i]
        factor = torch.from_numpy(scale)[:, None].to(p.device)
        return (p.double() * factor).sub_(q).clamp_(min=0.0)

    def residual_mass(self, n: np.ndarray, i: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Sums of the rows of `residual`: [M] float64, a few rows at a time."""
        mass = np.empty(len(n))
        size = max(1, _CACHED_VALUES // self.p.shape[1])
        for start in range(0, len(n), size):
            part = slice(start, start + size)
            # numpy adds up a row in one order; torch may split a single one over threads.
            mass[part] = self.residual(n[part], i[part], scale[part]).cpu().numpy().sum(axis=1)
        return mass


@dataclass(slots=True)
class Verdict:
    num_accepted: np.ndarray  # [N] int64: tau
    scale: np.ndarray  # [N] float64, of the residual; means nothing where tau = k


class AcceptanceRule(ABC):
    """Judges drafts. Holds no state: noise and counters are those of the request."""

    needs_probs: bool  # judges drafts that come with their q, and no others

    def noise_keys(
        self, domain: NoiseDomain, states: RequestStates, row: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seeds and positions that key the noise of `domain`. [M] int64 all.

        row: into `states`; position: absolute, of the token that is drawn or judged.
        """
        return domain_seeds(states.seeds[row], domain, 0), position

    @abstractmethod
    def judge(self, drafts: DraftedRequests) -> Verdict:
        """How many drafts of each request are kept."""


class ResidualRule(AcceptanceRule):
    """Token by token: keep x_i while u_i q_i(x_i) < p_i(x_i).

    Speculative sampling of Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv
    2302.01318). Noise may be keyed by absolute position: whether it stops at i is known without
    anything that belongs to later positions, so they are fresh when their turn comes.
    """

    needs_probs = True

    def judge(self, drafts: DraftedRequests) -> Verdict:
        p, q = drafts.probs_of_tokens()
        is_kept = drafts.uniforms * q < p
        is_kept &= q > 0  # what q cannot give was not drawn from it
        return Verdict(_length_of_run(is_kept), np.ones(len(p)))


class BlockRule(AcceptanceRule):
    """All drafts as one block: keep the longest prefix that any of the tests allows.

    Block verification of Sun et al. 2024 (arXiv 2403.10444), which keeps at least as many drafts as
    `ResidualRule` in expectation:

        P_0 = 1,  P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1)
        R_i = sum max(P_i p_{i+1} - q_{i+1}, 0),  h_i = R_i / (R_i + 1 - P_i),  h_k = P_k
        tau = the largest i with u_i < h_i, else 0;  scale = P_tau

    Here tau depends on drafts and uniforms *behind* it. If these came back in the next step under
    the same keys, they would no longer be independent of how the step began, and the output would
    be biased. So drafts and uniforms are keyed by the number of the verification and their place
    in it. The final draw may stay with its position: no other draw of a position is ever used.
    """

    needs_probs = True

    def noise_keys(
        self, domain: NoiseDomain, states: RequestStates, row: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if domain == NoiseDomain.RESIDUAL:
            return super().noise_keys(domain, states, row, position)
        seeds = domain_seeds(states.seeds[row], domain, states.num_verifications[row])
        return seeds, position - states.num_tokens[row]

    def judge(self, drafts: DraftedRequests) -> Verdict:
        p, q = drafts.probs_of_tokens()
        num_requests, most = p.shape
        ratio = np.divide(p, q, out=np.zeros_like(p), where=q > 0)
        prefix = np.ones((num_requests, most + 1))  # P_i
        num_accepted = np.zeros(num_requests, np.int64)
        for i in range(1, most + 1):
            prefix[:, i] = np.minimum(prefix[:, i - 1] * ratio[:, i - 1], 1.0)
            chance = prefix[:, i].copy()  # h_i, where x_i is the last draft
            n = np.flatnonzero(drafts.num_drafts > i)
            if len(n):
                scale = prefix[n, i]
                mass = drafts.residual_mass(n, np.full(len(n), i), scale)
                lost = mass + 1.0 - scale
                # Nothing lost at all: p and q are equal so far, and here.
                chance[n] = np.divide(mass, lost, out=np.ones_like(mass), where=lost > 0)
            is_kept = (drafts.num_drafts >= i) & (drafts.uniforms[:, i - 1] < chance)
            num_accepted[is_kept] = i
        return Verdict(num_accepted, prefix[np.arange(num_requests), num_accepted])


class SyntheticRule(AcceptanceRule):
    """Keeps drafts at given rates, whatever they are. The output means nothing; for benchmarks.

    rates    probability that draft j and all before it are kept, falling; none beyond the last
    length   or: the mean number of tokens per step, of steps with at least length - 1 drafts
    """

    needs_probs = False

    def __init__(self, rates: tuple[float, ...] | None, length: float | None) -> None:
        if (rates is None) == (length is None):
            raise ValueError("synthetic acceptance takes either rates or a length")
        self.rates = rates
        self.length = length

    def judge(self, drafts: DraftedRequests) -> Verdict:
        most = drafts.token_ids.shape[1]
        if self.length is not None:
            rates = self.length - 1.0 - np.arange(most)  # at most one is a fraction
        else:
            assert self.rates is not None
            rates = np.array([*self.rates, *[0.0] * most])[:most]
        # One uniform for all of a step's drafts makes the rates those of whole prefixes.
        is_kept = drafts.is_draft & (drafts.uniforms[:, :1] < rates)
        return Verdict(_length_of_run(is_kept), np.ones(len(is_kept)))


def make_rule(
    name: str, rates: tuple[float, ...] | None = None, length: float | None = None
) -> AcceptanceRule | None:
    """The rule called match (None: nothing to judge), residual, block or synthetic.

    rates, length: of synthetic, see `SyntheticRule`.
    """
    if name == "match":
        return None
    if name == "synthetic":
        return SyntheticRule(rates, length)
    return {"residual": ResidualRule, "block": BlockRule}[name]()


def _length_of_run(flags: np.ndarray) -> np.ndarray:
    """How many True each row begins with. [N, K] bool -> [N] int64."""
    lengths: np.ndarray = flags.cumprod(axis=1, dtype=np.int64).sum(axis=1)
    return lengths
