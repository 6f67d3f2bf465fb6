"""The report: a line at once, a table at the end, JSON that any program can read."""

import io
import json
import math

from nano.gpu_check.report import Report


def make_report() -> tuple[Report, io.StringIO]:
    out = io.StringIO()
    report = Report({"gpu": "none"}, out)
    report.section = "steps"
    return report, out


def test_what_is_found_is_printed_at_once_with_its_numbers():
    report, out = make_report()
    report.check("tokens", False, "request 3", gap=0.25)
    assert out.getvalue() == "[steps] FAILED   tokens: gap 0.25; request 3\n"
    report.refuse("graphs", ValueError("a CPU has none"))
    assert out.getvalue().endswith("[steps] refused  graphs: a CPU has none\n")


def test_only_a_failure_is_a_failure():
    report, _ = make_report()
    report.check("one", True)
    report.refuse("two", "not here")
    report.leave_out("three", "no time left")
    assert (report.verdict, report.exit_status) == ("passed", 0)
    report.is_interrupted = True
    assert (report.verdict, report.exit_status) == ("interrupted", 130)
    report.broke("four", RuntimeError("boom"))
    assert (report.verdict, report.exit_status) == ("failed", 1)


def test_an_error_is_told_with_the_place_where_it_was_raised():
    report, out = make_report()
    try:
        json.loads("{")
    except ValueError as error:
        report.broke("reading", error)
    assert "JSONDecodeError" in out.getvalue()
    assert "json/decoder.py" in out.getvalue()


def test_the_table_has_a_row_for_each_measurement_and_repeats_what_failed():
    report, _ = make_report()
    report.measure("batch 1", step_ms=1.5)
    report.measure("batch 64", step_ms=2.25, gap_ms=0.5)
    report.check("tokens", False)
    lines = report.table().splitlines()
    assert lines[1].split() == ["steps", "step_ms", "gap_ms"]
    assert lines[2].split() == ["batch", "1", "1.5"]
    assert lines[3].split() == ["batch", "64", "2.25", "0.5"]
    assert "[steps] FAILED   tokens" in lines
    assert lines[-1] == "failed: 1 FAILED, 2 measured"


def test_the_file_is_strict_json_even_where_a_number_is_infinite(tmp_path):
    report, _ = make_report()
    report.check("attention", False, "bound 1e-5", error=math.inf, rows=3)
    file = tmp_path / "report.json"
    report.write(file, 12.34)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(file.read_text(), parse_constant=refuse)
    assert record["verdict"] == "failed"
    assert record["seconds"] == 12.3
    assert record["facts"] == {"gpu": "none"}
    assert record["findings"] == [
        {
            "section": "steps",
            "name": "attention",
            "outcome": "FAILED",
            "detail": "bound 1e-5",
            "numbers": {"error": None, "rows": 3},
        }
    ]
