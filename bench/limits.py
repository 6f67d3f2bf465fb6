"""The limits of this machine, measured on the engine's own threads: `python -m bench.limits`.

Every speed in docs/log.md is also given as a share of one of them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from nano.native.build import load_ops, load_threads

_GIB = 2**30


@dataclass(frozen=True)
class Limits:
    read_gb_s: float  # main memory, all threads reading
    gflop_s: float  # float32 fused multiply-adds

    def bandwidth_share(self, num_bytes: float, seconds: float) -> str:
        return f"{num_bytes / seconds / 1e9 / self.read_gb_s:.0%} of {self.read_gb_s:.1f} GB/s"

    def compute_share(self, flops: float, seconds: float) -> str:
        return f"{flops / seconds / 1e9 / self.gflop_s:.0%} of {self.gflop_s:.0f} GFLOP/s"


def measure(num_threads: int) -> Limits:
    """The best of several runs with `num_threads` threads."""
    pool = load_threads()
    if pool is None or not load_ops(Path(__file__).with_name("limits.cpp")):
        raise SystemExit("measuring the limits needs a C++ compiler")
    pool.nano_set_num_threads(num_threads)
    data, factor = torch.ones(_GIB // 4), torch.tensor([0.999])
    ops = torch.ops.nano
    return Limits(
        read_gb_s=max(ops.read_rate(data) for _ in range(8)),
        gflop_s=max(ops.multiply_rate(factor, 400) for _ in range(8)),
    )


if __name__ == "__main__":
    for threads in (1, torch.get_num_threads()):
        print(threads, "threads:", measure(threads))
