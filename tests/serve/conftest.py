from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.serve.server import Server
from tests.tiny import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context so long that a request which is not aborted runs for minutes."""
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=32768)


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Server]:
    server = Server(checkpoint, "--max-num-seqs", "4", "--max-num-batched-tokens", "256")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(server: Server) -> OpenAI:
    return server.client()
