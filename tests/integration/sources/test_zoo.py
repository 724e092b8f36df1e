"""The zoo's runner with programs that need no GPU: what is harm, what is not."""

import json
from pathlib import Path

import pytest
from gpu.zoo import run, stand_still

pytestmark = pytest.mark.slow

COMMON = (
    "--stand-ins", "--device", "cpu", "--jobs", "4", "--defaults", "1", "--each", "1", "--kinds", "python_function",
    "--duration-s", "0.2", "--before-s", "0.5", "--after-s", "1", "--rounds", "1",
)  # fmt: skip
NAMES = ("is_wrong", "skips", "differs", "ended_by", "ends_by")


def test_harm_is_told_from_what_a_program_does_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run.main([*COMMON, "--output", str(tmp_path), "--programs", ",".join(NAMES)])
    rows = {row["name"]: row for row in json.loads((tmp_path / "zoo.json").read_text())}
    assert status == 1
    assert {name: row["state"] for name, row in rows.items()} == {
        "stand_in_skips": "skipped",
        "stand_in_differs": "HARMED",
        "stand_in_is_wrong": "not run",  # untouched, too
        "stand_in_ended_by_sigterm": "unharmed",
        "stand_in_ends_by_itself": "unharmed",
    }
    assert "digests differ" in rows["stand_in_differs"]["problems"][0]
    assert "a number is too large" in rows["stand_in_is_wrong"]["problems"][0]
    assert "5 programs" in capsys.readouterr().out


def test_an_unharmed_program_has_equal_digests_and_a_budget_ends_the_run(tmp_path: Path) -> None:
    assert run.main([*COMMON, "--output", str(tmp_path), "--programs", "stand_in", "--part", "1/8"]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "zoo.json").read_text())}
    assert set(rows) == {"stand_in", "stand_in_holds"}
    row = rows["stand_in"]
    assert (row["state"], row["verdicts"]) == ("unharmed", {"DONE": 2})
    assert row["compared"] > 0
    assert run.main([*COMMON, "--output", str(tmp_path), "--budget-s", "5"]) == 0
    assert {row["state"] for row in json.loads((tmp_path / "zoo.json").read_text())} == {"not run"}


def test_work_that_does_not_end_is_there_before_during_and_after_captures(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--output", str(tmp_path), "--bound-ms", "100000")
    assert stand_still.main([*options, "--duration-s", "0.3", "--drain-s", "0"]) == 0
    phases = json.loads((tmp_path / "stand_still.json").read_text())
    assert [(each["phase"], each["met"], each["held"], each["then"]) for each in phases] == [
        ("healthy", "DONE", True, ""),
        ("before", "DONE", True, "DONE"),
        ("during", "DONE", True, "DONE"),
        ("after", "DONE", True, "DONE"),
    ]
    assert phases[1]["reference"] >= 200  # the stand-in stands still for so long
