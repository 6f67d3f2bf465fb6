"""How many threads compute, and on whose behalf: our kernels' pool, or torch's.

Two pools that both spin for work would fight over the cores, so where our kernels do the heavy work
they get the threads, and torch, left with small change, computes on one.
"""

import os
from pathlib import Path

import torch

from nano.log import get_logger
from nano.native.build import load_threads

logger = get_logger(__name__)

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")


def set_num_threads(num_threads: int | None = None) -> int:
    """Compute on `num_threads` threads from now on (None: one per core that this process may use).

    Returns their number. Not while a step runs.
    """
    why = "as told"
    if num_threads is None:
        num_threads, why = usable_cores()
    pool = load_threads()
    if pool is None:
        torch.set_num_threads(num_threads)
    else:
        torch.set_num_threads(1)
        pool.nano_set_num_threads(num_threads)
        num_threads = pool.nano_num_threads()
    logger.info(
        "threads: %d of %s (%s)",
        num_threads,
        "torch" if pool is None else "our kernels",
        why,
    )
    return num_threads


def usable_cores() -> tuple[int, str]:
    """Cores that this process may use, and what limits them.

    A second hardware thread of a core is not counted: it brings no bandwidth and no multipliers.
    """
    cpus = _affinity()
    cores = {_core(cpu) for cpu in cpus}
    why = f"one per core, of {len(cpus)} usable CPUs"
    quota = _cpu_quota()
    if quota is not None and quota < len(cores):
        return max(1, int(quota)), f"a CPU quota of {quota:g}"
    return len(cores), why


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core(cpu: int) -> str:
    """A name for the core that `cpu` is a hardware thread of."""
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return f"{cpu}\n"


def _cpu_quota() -> float | None:
    """CPUs' worth of time that the control groups of this process allow; None: no limit."""
    quotas = []
    for group in _own_groups():
        try:
            if (group / "cpu.max").exists():  # version 2
                limit, period = (group / "cpu.max").read_text().split()
            else:
                limit = (group / "cpu.cfs_quota_us").read_text()
                period = (group / "cpu.cfs_period_us").read_text()
            if limit.strip() not in ("max", "-1"):
                quotas.append(int(limit) / int(period))
        except (OSError, ValueError):
            continue
    return min(quotas, default=None)


def _own_groups() -> list[Path]:
    """The folders of this process's CPU control group and of all above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / "cpu" if controllers else _CGROUPS
        group = root / path.lstrip("/")
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return folders
