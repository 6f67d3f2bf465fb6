"""The server under a mixed load: `bench.load`, shorter."""

import random
from pathlib import Path

from bench.load import make_catalogue, run_load
from tests.serve.server import Server
from tests.tiny import make_checkpoint


def test_under_load_every_surviving_stream_has_the_tokens_of_the_offline_run_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path / "tiny", max_position_embeddings=4096)
    catalogue = make_catalogue(folder, random.Random(0), {"compile_mode": "eager"})
    server = Server(folder, "--compile-mode", "eager", "--max-num-seqs", "16")
    try:
        load, before, after = run_load(server, catalogue, 40, seconds=10, warm_seconds=1)
    finally:
        server.stop()
    assert load.problems == []
    assert min(load.outcomes[name] for name in ("whole", "vanished", "bad")) > 0
    assert before.is_idle
    assert after.is_idle
    assert after.num_files <= before.num_files
