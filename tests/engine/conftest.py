"""The two models of the tests of speculation: a target, and another over the same vocabulary."""

from pathlib import Path

import pytest

from tests.tiny import make_checkpoint


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture and other weights."""
    return make_checkpoint(
        tmp_path_factory.mktemp("other"), "qwen2", seed=5, num_hidden_layers=1, hidden_size=32
    )
