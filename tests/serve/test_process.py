"""How a server ends: its core dies, it is told to stop, it cannot start."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest

from tests.engine.fake_core import is_running
from tests.serve.server import Server

pytestmark = pytest.mark.slow

LONG = {
    "model": "tiny",
    "prompt": "Once",
    "max_tokens": 30_000,
    "extra_body": {"ignore_eos": True},
}


def test_a_killed_core_fails_whoever_waits_and_shows_in_health(checkpoint: Path) -> None:
    server = Server(checkpoint)
    client = server.client()
    stream = iter(client.completions.create(stream=True, **LONG))
    next(stream)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            client.completions.create(**LONG)
        except openai.APIError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)  # so that it most likely waits when the core dies; else it is refused
    os.kill(server.core_pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="killed by signal 9"):
        for _ in stream:
            pass
    waiting.join(10)
    for error in errors:
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
        assert "killed by signal 9" in str(error)
    assert len(errors) == 1

    assert server.http.get("/health").status_code == 503
    assert "killed by signal 9" in server.http.get("/health").json()["error"]["message"]
    for streams in (False, True):
        with pytest.raises(openai.InternalServerError, match="killed by signal 9"):
            client.completions.create(stream=streams, **LONG)
    assert server.stop() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_server_ends_its_streams_and_leaves_no_process(
    checkpoint: Path, signum: int
) -> None:
    server = Server(checkpoint)
    stream = iter(server.client().completions.create(stream=True, **LONG))
    next(stream)
    server.process.send_signal(signum)
    with pytest.raises(openai.APIError, match="the server is shutting down"):
        for _ in stream:
            pass
    assert server.stop() == 0
    assert not is_running(server.core_pid)


def test_a_server_whose_model_does_not_load_says_why_and_ends(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "nano.serve", "--model", str(tmp_path / "nothing")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert str(tmp_path / "nothing") in result.stderr
    assert "Traceback" not in result.stderr


def test_weights_that_the_core_cannot_read_end_the_server_with_the_reason(
    checkpoint: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix == ".json":
            (damaged / file.name).write_bytes(file.read_bytes())
    (damaged / "model.safetensors").write_bytes(b"not weights")
    result = subprocess.run(
        [sys.executable, "-m", "nano.serve", "--model", str(damaged)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_small_cache_and_processed_logprobs_are_told_apart_from_errors(
    checkpoint: Path,
) -> None:
    options = ("--num-gpu-blocks-override", "4", "--logprobs-mode", "processed_logprobs")
    server = Server(checkpoint, *options)
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="64 tokens long; at most 63 fit") as no:
        client.completions.create(model="tiny", prompt="x" * 64)
    assert no.value.param == "prompt"
    full = client.completions.create(**{**LONG, "prompt": "x" * 60})
    assert full.choices[0].finish_reason == "length"
    assert full.usage is not None
    assert full.usage.completion_tokens == 4
    only_a = client.completions.create(
        model="tiny", prompt="x", max_tokens=1, logprobs=2, extra_body={"allowed_token_ids": [65]}
    )
    logprobs = only_a.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [0.0]
    assert logprobs.top_logprobs is not None
    assert -9999.0 in logprobs.top_logprobs[0].values()
    assert server.stop() == 0


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "nano.serve", "--model", str(checkpoint), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "weights" not in done.stderr
