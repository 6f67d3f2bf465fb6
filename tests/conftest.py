"""What every test runs under. Before torch is imported."""

import logging
import os
import signal
from collections.abc import Iterator

import pytest

# A spinning OpenMP thread makes a shared machine fifty times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell starts its background commands deaf to Ctrl-C, which tests send to themselves and others.
signal.signal(signal.SIGINT, signal.default_int_handler)
# "auto" would start a compiler for every tiny model, so tests of compiled pieces ask for them. With
# "compiled" in the environment all other tests run so, too.
os.environ.setdefault("NANO_COMPILE_MODE", "eager")
# "auto" would take a GPU where there is one, and tests say what is true of a CPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A program that a test runs in this process sets logging up, and leaves it so."""
    logger = logging.getLogger("nano")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
