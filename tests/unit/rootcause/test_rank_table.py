"""How jobs of two ranks are judged."""

from pathlib import Path

from rootcause.judgement import names
from rootcause.rank_causes import RANK_CAUSES
from rootcause.rank_jobs import MeasuredJob
from rootcause.rank_table import findings_for

SLEEP = {"rank": 1, "title": "wait_for_license (a.py:1): it sleeps", "advice": "Take the sleep out.", "saving_pct": 9.0}


def test_a_finding_of_another_rank_names_nothing() -> None:
    cause = next(cause for cause in RANK_CAUSES if cause.name == "ddp_sleep")
    job = MeasuredJob(60.0, {"findings": {"rows": [SLEEP, {**SLEEP, "rank": 0}]}}, (Path("a"), Path("b")))
    assert [names(finding, cause) for finding in findings_for(job, cause)] == [True, False]


def test_a_cause_of_all_ranks_is_named_by_a_finding_of_any() -> None:
    cause = next(cause for cause in RANK_CAUSES if cause.name == "deep_small_buckets")
    row = {**SLEEP, "title": "The GPU is idle while the host calls many small collectives", "advice": "larger buckets"}
    job = MeasuredJob(60.0, {"findings": {"rows": [row, {**row, "rank": 0}]}}, (Path("a"), Path("b")))
    assert all(names(finding, cause) for finding in findings_for(job, cause))


def test_the_program_is_told_the_cause_without_its_own_name() -> None:
    assert {cause.name: cause.job for cause in RANK_CAUSES}["ddp_slow_input"] == "ddp/slow_input"
