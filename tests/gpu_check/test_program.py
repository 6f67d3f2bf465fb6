"""The program: all sections run on a CPU, none stops another, time is kept, the status tells."""

import json
import time

import pytest

from nano.gpu_check import program
from nano.gpu_check.__main__ import main
from nano.gpu_check.box import DeviceLost
from nano.gpu_check.program import SECTIONS, Section, run_sections
from nano.gpu_check.report import Outcome
from tests.gpu_check.boxes import found, quiet_box

NAMES = [section.name for section in SECTIONS]


def check(tmp_path, *more: str) -> tuple[int, dict]:
    output = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--work-folder", tmp_path, "--output", output, *more]
    status = main([str(argument) for argument in arguments])
    return status, json.loads(output.read_text()) if output.exists() else {}


def test_the_whole_program_runs_on_a_cpu_and_says_what_needs_a_gpu(tmp_path, capsys):
    status, record = check(tmp_path, "--leave-out", "compiled", "suffix", "self_quant")
    said = capsys.readouterr().out
    assert (status, record["verdict"]) == (0, "passed"), said
    findings = record["findings"]
    assert list(dict.fromkeys(finding["section"] for finding in findings)) == NAMES
    outcomes = {section: set() for section in NAMES}
    for finding in findings:
        outcomes[finding["section"]].add(finding["outcome"])
    for section in ("attention", "sampling", "tokens", "syncs"):
        assert "ok" in outcomes[section]
    for section in ("limits", "steps", "speculation"):
        assert "measured" in outcomes[section]
    assert "a CPU has no graphs" in said
    assert record["facts"]["device"] == "cpu"
    table = said.splitlines()[-25:]
    assert any(line.startswith("steps ") and "step_ms" in line for line in table)
    assert said.splitlines()[-2].startswith("passed: ")
    assert not list(tmp_path.glob("nano-gpu-check-*"))  # the models are gone


def test_a_device_that_is_not_there_is_a_refusal(tmp_path, capsys):
    output = tmp_path / "report.json"
    assert main(["--device", "tpu", "--output", str(output)]) == 2
    assert "device must be 'cpu', 'cuda'" in capsys.readouterr().err
    assert not output.exists()


def run(box, *sections: Section, grace: float = 0.1) -> None:
    run_sections(box, sections, grace)


def fails(box) -> None:
    raise ValueError("boom")


def passes(box) -> None:
    box.report.check("good", True)


def test_a_section_that_raises_is_told_and_the_next_one_runs(tmp_path):
    box = quiet_box(tmp_path)
    run(box, Section("first", 1, fails), Section("second", 1, passes))
    (broken,) = found(box, Outcome.BROKEN)
    assert broken.section == "first"
    assert "ValueError: boom" in broken.detail
    assert found(box, Outcome.PASSED)[0].section == "second"
    assert box.report.exit_status == 1


def test_a_section_that_does_not_end_is_ended_and_the_next_one_runs(tmp_path):
    box = quiet_box(tmp_path)
    run(box, Section("first", 1e-6, lambda box: time.sleep(60)), Section("second", 1, passes))
    (left_out,) = found(box, Outcome.LEFT_OUT)
    assert left_out.section == "first"
    assert "overran" in left_out.detail
    assert found(box, Outcome.PASSED)[0].section == "second"


def test_what_a_section_leaves_of_its_time_is_for_those_behind_it(tmp_path):
    box = quiet_box(tmp_path)
    box.deadline = box.deadline.child(100.0)
    shares = []

    def look(box) -> None:
        shares.append(box.deadline.left)

    run(box, Section("first", 1, look), Section("second", 1, look), Section("third", 2, look))
    assert shares == pytest.approx([25.0, 100 / 3, 100.0], abs=1.0)


def test_without_time_everything_is_left_out_by_name(tmp_path):
    box = quiet_box(tmp_path)
    box.deadline = box.deadline.child(0.0)
    run_sections(box)
    assert not found(box, Outcome.FAILED) + found(box, Outcome.BROKEN)
    assert {finding.section for finding in found(box, Outcome.LEFT_OUT)} == set(NAMES)


def test_sections_are_left_out_as_told(tmp_path):
    box = quiet_box(tmp_path)
    box.left_out = frozenset({"first"})
    run(box, Section("first", 1, fails), Section("second", 1, passes))
    assert found(box, Outcome.LEFT_OUT)[0].detail == "as told"
    assert box.report.exit_status == 0


def test_a_lost_device_ends_the_check(tmp_path, monkeypatch):
    box = quiet_box(tmp_path)

    def gone() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(box.device, "synchronize", gone)
    run(box, Section("first", 1, fails), Section("second", 1, passes))
    assert [finding.section for finding in found(box, Outcome.BROKEN)] == ["first", "first"]
    assert DeviceLost.__name__ in found(box, Outcome.BROKEN)[1].detail
    assert not found(box, Outcome.PASSED)


def test_after_an_interrupt_the_table_and_the_file_are_there(tmp_path, monkeypatch, capsys):
    def interrupt(box) -> None:
        box.report.measure("batch 1", step_ms=1.0)
        raise KeyboardInterrupt

    run_all = program.run_sections
    sections = (Section("first", 1, interrupt), Section("second", 1, passes))
    monkeypatch.setattr(program, "run_sections", lambda box: run_all(box, sections))
    status, record = check(tmp_path)
    assert (status, record["verdict"]) == (130, "interrupted")
    assert [finding["section"] for finding in record["findings"]] == ["first"]
    assert "interrupted: 1 measured" in capsys.readouterr().out
