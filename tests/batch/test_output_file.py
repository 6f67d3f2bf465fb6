"""What the output file keeps, whatever was in it."""

from pathlib import Path

import pytest

from nano.batch.output_file import OutputFile, check_paths
from nano.errors import ConfigError

BODY = b'{"a":1}'


def answer(path: Path, *numbers: int) -> None:
    output = OutputFile(str(path))
    for number in numbers:
        output.append(number, f"c{number}", 400 if number % 2 else 200, "r", BODY)
    output.close()


def test_every_torn_end_is_cut_off_and_every_whole_line_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    answer(path, 3, 12)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        output = OutputFile(str(path))
        output.close()
        kept = first if first <= length < len(whole) else (length == len(whole)) * length
        assert path.read_bytes() == whole[:kept], length
        assert set(output.done) == {0: set(), first: {3}, len(whole): {3, 12}}[kept]
    assert output.done[3] == ("c3", True)
    assert output.done[12] == ("c12", False)


@pytest.mark.parametrize("text", ["my thesis", "my thesis\n", '{"id": "batch_req_x"}\n', "[]\n"])
def test_a_file_of_somebody_elses_is_refused_and_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out"
    answer(path, 1)
    for before in ("", path.read_text()):
        path.write_text(before + text)
        with pytest.raises(ConfigError, match=r"out, line \d, was not written by nano.batch"):
            OutputFile(str(path))
        assert path.read_text() == before + text


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    first = OutputFile(path)
    with pytest.raises(ConfigError, match="is being written by another run"):
        OutputFile(path)
    first.close()
    OutputFile(path).close()


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    for path in ("/dev/null", str(tmp_path), str(tmp_path / "no" / "out")):
        with pytest.raises(ConfigError, match=path):
            OutputFile(path)


def test_input_and_output_must_differ(tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    (tmp_path / "out").symlink_to(tmp_path / "in")
    with pytest.raises(ConfigError, match="one file"):
        check_paths(str(tmp_path / "in"), str(tmp_path / "out"))
    check_paths("-", "-")
