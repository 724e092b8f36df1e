"""The planted causes of programs that compute on the CPU, and traces that are judged again."""

import json
import re
from pathlib import Path

import pytest
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
    "finding": "user_code_lock", "title": "after_step waits", "advice": "Hold the lock shorter", "where": "",
    "saving_pct": 45.0,
}  # fmt: skip
SAID = "after_step waits. Hold the lock shorter."


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """What was kept of a run with a lock, in which the main thread also waited 40 % of the time for a processor."""
    for name, step_ms in (("lock", 20.0), ("services-control", 10.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "measured.json").write_text(json.dumps({"step_ms": step_ms, "waited_pct": 40.0, "findings": []}))
    return tmp_path


def test_a_kept_trace_is_judged_again_by_the_rules_of_now(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "answer_of", lambda trace: ([WAITS], SAID) if trace.parent.name == "lock" else ([], ""))
    verdict = judge_again(LOCK, kept)
    assert (verdict.place, verdict.predicted_pct, verdict.share_pct) == (1, 45.0, 50.0)
    assert (verdict.should_be_said, verdict.is_said) == (True, True)


def test_a_verdict_on_other_programs_need_not_name_the_cause(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**WAITS, "finding": "no_processor", "title": "short of CPU"}
    monkeypatch.setattr(runs, "answer_of", lambda _trace: ([other, WAITS], "The thread is short of CPU."))
    verdict = judge_again(LOCK, kept)
    assert (verdict.place, verdict.should_be_said) == (1, False)


def test_what_was_not_kept_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no kept run"):
        judge_again(Cause(name="lock", program="services", where="", remedy=""), tmp_path)
