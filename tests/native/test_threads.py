"""The pool of threads: every task runs once, whoever calls, from wherever."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from nano.native import build, threads
from nano.native.threads import set_num_threads, usable_cores

SOURCE = """
#include <sched.h>
#include <sys/types.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "threads.h"

static void add(int* count) { __atomic_fetch_add(count, 1, __ATOMIC_RELAXED); }

extern "C" {
void run_tasks(long num_tasks, int* counts) {
  parallel_for(num_tasks, [&](long task) { add(counts + task); });
}

void run_nested(long num_tasks, int* counts) {
  parallel_for(num_tasks, [&](long task) {
    parallel_for(num_tasks, [&](long inner) { add(counts + task * num_tasks + inner); });
  });
}

// The thread that ran each task; a task takes a while.
void run_slowly(long num_tasks, int* thread_ids) {
  parallel_for(num_tasks, [&](long task) {
    usleep(1000);
    thread_ids[task] = (int)syscall(SYS_gettid);
  });
}
}
"""


@pytest.fixture(scope="module")
def pool() -> ctypes.CDLL:
    pool = build.load_threads()
    if pool is None:
        pytest.skip("needs a C++ compiler")
    before = pool.nano_num_threads()
    yield pool
    pool.nano_set_num_threads(before)


@pytest.fixture(scope="module")
def jobs(pool, tmp_path_factory) -> ctypes.CDLL:
    source = tmp_path_factory.mktemp("jobs") / "jobs.cpp"
    source.write_text(SOURCE)
    jobs = build._loaded(source, build.cpu_flags())
    for job in (jobs.run_tasks, jobs.run_nested, jobs.run_slowly):
        job.argtypes = [ctypes.c_long, ctypes.c_void_p]
        job.restype = None
    return jobs


def counts_of(job, num_tasks: int, num_counts: int | None = None) -> np.ndarray:
    counts = np.zeros(num_tasks if num_counts is None else num_counts, dtype=np.int32)
    job(num_tasks, counts.ctypes.data)
    return counts


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_runs_once_in_jobs_of_any_size(pool, jobs, num_threads):
    pool.nano_set_num_threads(num_threads)
    assert pool.nano_num_threads() == num_threads
    for num_tasks in (0, 1, 2, 3, 7, 100, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        assert (counts_of(jobs.run_tasks, num_tasks) == 1).all()


def test_many_short_jobs_with_the_number_of_threads_changing_between_them(pool, jobs):
    for i in range(3000):
        if i % 50 == 0:
            pool.nano_set_num_threads(1 + i // 50 % 4)
        assert (counts_of(jobs.run_tasks, i % 13) == 1).all()


def test_a_job_is_shared_by_as_many_threads_as_asked_for(pool, jobs):
    for num_threads in (1, 3, 2):
        pool.nano_set_num_threads(num_threads)
        assert len(set(counts_of(jobs.run_slowly, 40))) == num_threads


def test_a_job_within_a_task_is_run_by_the_thread_that_asked(pool, jobs):
    pool.nano_set_num_threads(2)
    assert (counts_of(jobs.run_nested, 30, 900) == 1).all()
    assert (counts_of(jobs.run_tasks, 30) == 1).all()


def test_callers_at_the_same_time_do_not_disturb_one_another(pool, jobs):
    pool.nano_set_num_threads(2)
    with ThreadPoolExecutor(4) as callers:
        results = callers.map(lambda i: counts_of(jobs.run_tasks, 1 + i % 50), range(2000))
        assert all((counts == 1).all() for counts in results)


def test_a_forked_child_still_computes(pool, jobs):
    pool.nano_set_num_threads(2)
    counts_of(jobs.run_tasks, 100)
    child = os.fork()
    if child == 0:  # the threads of the pool are not here, and nothing may wait for them
        os._exit(0 if (counts_of(jobs.run_tasks, 100) == 1).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (counts_of(jobs.run_tasks, 100) == 1).all()


def test_setting_the_threads_gives_them_to_our_kernels_and_one_to_torch(pool):
    before = torch.get_num_threads()
    assert set_num_threads(3) == 3
    assert (pool.nano_num_threads(), torch.get_num_threads()) == (3, 1)
    assert set_num_threads() == usable_cores()[0]
    torch.set_num_threads(before)


def test_without_our_kernels_torch_gets_the_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "load_threads", lambda: None)
    assert set_num_threads(2) == 2
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_the_number_of_threads_and_its_reason_are_logged(monkeypatch, caplog):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "load_threads", lambda: None)
    monkeypatch.setattr(threads, "usable_cores", lambda: (2, "a CPU quota of 2.5"))
    with caplog.at_level("INFO", logger="nano"):
        set_num_threads()
    assert "threads: 2 of torch (a CPU quota of 2.5)" in caplog.text
    torch.set_num_threads(before)


def test_a_core_with_two_hardware_threads_counts_once(monkeypatch):
    monkeypatch.setattr(threads, "_affinity", lambda: {0, 1, 2, 3, 6})
    monkeypatch.setattr(threads, "_core", lambda cpu: f"core {cpu // 2}")
    monkeypatch.setattr(threads, "_cpu_quota", lambda: None)
    assert usable_cores() == (3, "one per core, of 5 usable CPUs")


@pytest.mark.parametrize(("quota", "num_cores"), [(2.5, 2), (0.5, 1), (16.0, 4)])
def test_a_cpu_quota_limits_the_threads(monkeypatch, quota, num_cores):
    monkeypatch.setattr(threads, "_affinity", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "_core", lambda cpu: f"core {cpu}")
    monkeypatch.setattr(threads, "_cpu_quota", lambda: quota)
    assert usable_cores()[0] == num_cores


def test_the_smallest_quota_of_all_groups_counts(monkeypatch, tmp_path):
    inner, outer, old = (tmp_path / name for name in ("inner", "outer", "old"))
    for group in (inner, outer, old):
        group.mkdir()
    (inner / "cpu.max").write_text("max 100000\n")
    (outer / "cpu.max").write_text("150000 100000\n")
    (old / "cpu.cfs_quota_us").write_text("300000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(threads, "_own_groups", lambda: [inner, outer, old, tmp_path / "none"])
    assert threads._cpu_quota() == 1.5
    monkeypatch.setattr(threads, "_own_groups", lambda: [inner, tmp_path / "none"])
    assert threads._cpu_quota() is None


def test_threads_pinned_to_one_core_are_one():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs CPU affinity")
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from nano.native.threads import usable_cores; print(usable_cores()[0])"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "1"
