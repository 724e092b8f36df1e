"""The planted causes of programs that compute on the CPU, and traces that are judged again."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.catalog.first_screen import FirstScreen
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.view_api.result import Result, make_result
from rootcause import runs
from rootcause.causes import AFTERTHOUGHTS, CAUSES, FRAMEWORKS, HELD_OUT, Cause
from rootcause.runs import judge_again

PROGRAMS = Path(runs.__file__).parent / "programs"
ALL = (*CAUSES, *HELD_OUT, *FRAMEWORKS, *AFTERTHOUGHTS)


def test_each_cause_is_planted_in_its_program() -> None:
    for cause in (*HELD_OUT, *FRAMEWORKS, *AFTERTHOUGHTS):
        assert f'"{cause.name}"' in (PROGRAMS / f"{cause.program.replace('.', '/')}.py").read_text(), cause.name


def test_each_cause_has_a_name_of_its_own() -> None:
    assert len({cause.name for cause in ALL}) == len(ALL)


def test_patterns_do_not_fit_everything() -> None:
    told = "Look at the step", "Make it faster."
    assert not [cause.name for cause in ALL if re.search(cause.where, told[0]) and re.search(cause.remedy, told[1])]


LOCK = Cause(name="lock", program="services", where="after_step", remedy="lock")
WAITS = {
    "finding": "user_code_lock", "title": "after_step waits", "advice": "Hold the lock shorter.", "saving_us": 9e3,
    "saving_pct": 45.0, "saving_per_step_us": 9e3, "guess": False,
}  # fmt: skip
OTHERS = {**WAITS, "finding": "no_processor", "title": "The thread is short of CPU", "advice": "Look elsewhere."}


def screen(*findings: dict[str, Any]) -> FirstScreen:
    def result(name: str, rows: Sequence[dict[str, Any]]) -> Result:
        values = {column.name: [row.get(column.name) for row in rows] for column in VIEWS[name].result_columns}
        return make_result(name, VIEWS[name].result_columns, values)

    nothing = result("time_causes", ())
    found = result("findings", findings)
    return FirstScreen(facts=(), verdict="", cause="", time=nothing, findings=found, missing=nothing)


@pytest.mark.parametrize("found", [(WAITS,), (OTHERS, WAITS)])
def test_a_kept_trace_is_judged_again_without_what_other_programs_took(
    found: tuple[dict[str, Any], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, step_ms in (("lock", 20.0), ("services-control", 10.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "measured.json").write_text(json.dumps({"step_ms": step_ms, "waited_pct": 40.0, "findings": []}))
    monkeypatch.setattr(runs, "screen_of", lambda trace: screen(*(found if trace.parent.name == "lock" else ())))
    verdict = judge_again(LOCK, tmp_path)
    assert (verdict.place, verdict.predicted_pct, verdict.share_pct) == (1, 45.0, 50.0)
    assert verdict.sentence == (
        "after_step waits. Hold the lock shorter. That could save up to 9 ms a step (45 %, likely)."
    )
    assert verdict.should_be_said and verdict.is_said


def test_what_was_not_kept_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no kept run"):
        judge_again(Cause(name="lock", program="services", where="", remedy=""), tmp_path)
