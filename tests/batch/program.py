"""`python -m nano.batch` as a program, for tests."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 120  # for anything to happen on a busy machine

Json = dict[str, Any]


class Program:
    """A run of `input` to `output` on the checkpoint in `folder`."""

    def __init__(self, folder: Path, source: Path | str, target: Path | str, *arguments: str):
        self.target = target
        command = [sys.executable, "-m", "nano.batch", "-i", str(source), "-o", str(target)]
        command += ["--model", str(folder), "--served-model-name", "tiny"]
        command += ["--compile-mode", "eager", "--num-gpu-blocks-override", "4096", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def finish(self, text: bytes = b"") -> tuple[int, bytes, str]:
        """(exit status, stdout, stderr), `text` being its stdin."""
        try:
            out, log = self.process.communicate(text, SECONDS)
        finally:
            self.process.kill()
        return self.process.returncode, out, log.decode()

    def wait_for_lines(self, number: int) -> None:
        """Until the output has that many whole lines, or the program has ended."""
        deadline = time.monotonic() + SECONDS
        while self._num_lines() < number and self.process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def _num_lines(self) -> int:
        target = Path(self.target)
        return target.read_bytes().count(b"\n") if target.exists() else 0


def line(custom_id: str, body: Json, url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read(path: Path) -> list[Json]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def comparable(body: Json) -> Json:
    """A body without what differs from call to call: ids, times, and what was cached by then."""
    body = {name: value for name, value in body.items() if name not in ("id", "created")}
    if "usage" in body:
        body["usage"] = {**body["usage"], "prompt_tokens_details": None}
    return body
