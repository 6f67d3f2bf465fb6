"""The compiling child: it works once, at the lowest priority, and leaves with its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nano.compile import artifact
from nano.compile.compiler_process import CompilerProcess
from nano.compile.store import ArtifactStore
from nano.native.build import compiler
from tests.compile.small_model import Small, small_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler"),
]
SECONDS = 120


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = ArtifactStore.default()
    assert store is not None
    return store


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def unfinished(store: ArtifactStore) -> list[Path]:
    return list(store.root.glob("*.tmp"))


def test_after_one_is_killed_two_at_once_compile_once_and_the_pieces_compute_the_model(store):
    model = Small()
    request = small_request(model)
    killed = CompilerProcess(request, is_background=False)  # B108
    wait_until(lambda: unfinished(store))
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: killed.poll() is not None)
    assert killed.last_words() == "it ended with status -9 and no word"
    killed.close()
    (left,) = unfinished(store)

    children = [CompilerProcess(request, is_background=False) for _ in range(2)]
    wait_until(lambda: unfinished(store) and unfinished(store) != [left])
    for child in children:
        wait_until(lambda child=child: child.poll() is not None)
        assert child.poll() == 0, child.last_words()
        child.close()
    assert [path.name for path in store.root.iterdir() if path.is_dir()] == [request.key]
    folder = store.find(request.key)
    assert folder is not None
    manifest = artifact.Manifest.read(folder)
    assert (manifest.report.num_calls, manifest.weights) == (1, ["table", "scale"])
    *_, forward = artifact.load(folder, model, {})
    assert forward is not None
    for num_tokens in (1, 2, 9):
        ids = torch.arange(num_tokens)
        assert torch.equal(forward(ids), model(ids))


def test_without_a_working_compiler_it_says_so_in_its_last_line(store, monkeypatch):  # B110
    monkeypatch.setenv("CXX", "/bin/false")
    child = CompilerProcess(small_request(Small()), is_background=False)
    wait_until(lambda: child.poll() is not None)
    assert child.poll() == 1
    assert child.last_words().startswith("error: ")
    assert "/bin/false" in child.last_words()
    child.close()
    assert not unfinished(store)


def test_in_the_background_it_takes_only_time_that_nobody_wants(store):
    request = small_request(Small())
    with store.building(request.key):  # so that it waits
        child = CompilerProcess(request, is_background=True)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 19  # before it does anything
        assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
        assert os.getpgid(child.pid) == child.pid
        assert os.getsid(child.pid) == os.getsid(0)
        child.close()
        assert not is_alive(child.pid)
        child.close()


PARENT = """
import sys, time
from nano.compile.compiler_process import CompilerProcess
from tests.compile.small_model import Small, small_request
child = CompilerProcess(small_request(Small()), is_background=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent_however_that_dies(store, signum):
    with store.building(small_request(Small()).key):
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signum)
        parent.wait()
        parent.stdout.close()
        wait_until(lambda: not is_alive(pid))


GROUP = """
import os, subprocess, time
from nano.compile.__main__ import _end_with_parent
_end_with_parent()
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""


def test_the_compilers_it_started_die_with_it():
    child = subprocess.Popen(
        [sys.executable, "-c", GROUP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    assert is_alive(pid)
    child.stdin.close()
    assert child.wait(SECONDS) == -signal.SIGKILL
    wait_until(lambda: not is_alive(pid))
    child.stdout.close()
