"""Log lines reach stderr whole and at once, or nobody minds."""

import subprocess
import sys
from typing import IO

import pytest

from nano.log import get_logger, setup_logging, write_line

TALKS = """
import os
from nano.log import get_logger, setup_logging
setup_logging("talker", "info")
get_logger("nano.talk").warning("caf\\u00e9 \\ud800 %d", 7)
os._exit(3)
"""
TALKS_AND_ENDS = TALKS.replace("os._exit(3)", "")


def run(program: str, stderr: int | IO[bytes]) -> "subprocess.CompletedProcess[str]":
    """Run `program` with an environment in which Python buffers stderr."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env={}, encoding="utf-8", stderr=stderr, check=False)


def test_a_line_is_written_before_the_process_can_die() -> None:
    ended = run(TALKS, subprocess.PIPE)
    assert ended.returncode == 3
    assert ended.stderr.endswith(" WARNING [talker] café \\ud800 7\n")
    assert ended.stderr.count("\n") == 1


def test_a_full_disk_takes_no_line_and_no_exit_status() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        assert run(TALKS_AND_ENDS, full).returncode == 0


def test_a_closed_stderr_is_no_trouble() -> None:
    command = ["sh", "-c", f"exec '{sys.executable}' -c \"$0\" 2>&-", TALKS_AND_ENDS]
    assert subprocess.run(command, env={}, check=False).returncode == 0


def test_who_captures_stderr_gets_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("main", "info")
    get_logger("nano.talk").info("hello %s", "there")
    write_line("{}")
    heard = capsys.readouterr().err.splitlines()
    assert heard[0].endswith(" INFO    [main] hello there")
    assert heard[1] == "{}"


def test_a_message_that_its_arguments_do_not_fit_is_told_and_harms_nobody(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("main", "info")
    get_logger("nano.talk").info("%d", "seven")
    assert "TypeError" in capsys.readouterr().err
