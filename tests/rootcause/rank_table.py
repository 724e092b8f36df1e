"""Runs the jobs of two ranks with and without each cause, and prints what the analyses say of them."""

import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kineto_trace.catalog.first_screen import first_screen_of
from support.service.daemon import Daemon, running_daemon

from rootcause.judgement import TOLERANCE_POINTS, Verdict, judge
from rootcause.rank_causes import RANK_CAUSES, RankCause
from rootcause.rank_jobs import MeasuredJob, gpus, measure_job
from rootcause.table import HEADER, row, summary

SHOWN = 3  # findings of each job
WORTH_SAYING_PCT = 5.0  # what the job would gain if one rank were as fast as the others


def run_ranks(names: Sequence[str], keep: Path | None, *, listing: bool = False) -> int:
    """Runs the named causes, or all. Returns 1 if a job failed, 2 if a name is unknown."""
    chosen = [cause for cause in RANK_CAUSES if not names or cause.name in names]
    if listing or len(chosen) < len(set(names)):
        print("\n".join(cause.name for cause in RANK_CAUSES))
        return 0 if listing else 2
    count = gpus()
    print(f"{count} GPUs: {'NCCL, a GPU for each rank' if count > 1 else 'gloo on the CPU'}", flush=True)
    chosen = [cause for cause in chosen if count > 1 or not cause.needs_gpu]
    verdicts, failed, ranks_right = [], [], 0
    controls: dict[str, MeasuredJob] = {}
    with tempfile.TemporaryDirectory(prefix="rootcause-") as folder, running_daemon() as daemon:
        print(HEADER, flush=True)
        for cause in chosen:
            try:
                if cause.program not in controls:
                    controls[cause.program] = _measured(daemon, cause.program, f"{cause.program}_control", folder, keep)
                planted = _measured(daemon, cause.job, cause.name, folder, keep)
            except RuntimeError as exc:
                failed.append(cause.name)
                print(f"{cause.name:<24}{exc}", flush=True)
                continue
            control = controls[cause.program]
            found, clean = (planted.step_ms, findings_for(planted, cause)), (control.step_ms, control.findings)
            verdict = judge(cause, found, clean, first_screen_of(planted.traces).verdict)
            verdicts.append(verdict)
            ranks_right += _print(cause, verdict, planted)
    print(summary(verdicts))
    told = [verdict for verdict in verdicts if isinstance(verdict.cause, RankCause)]
    print(f"the rank that the others wait for, or none, told rightly: {ranks_right} of {len(told)}")
    return 1 if failed else 0


def findings_for(planted: MeasuredJob, cause: RankCause) -> list[Mapping[str, Any]]:
    """The findings; those of a rank that is not the one with the cause name nothing."""
    return [
        found if cause.rank is None or cause.rank in _ranks_of(found) else {**found, "advice": "", "where": ""}
        for found in planted.findings
    ]


def _ranks_of(finding: Mapping[str, Any]) -> tuple[int, ...]:
    return (finding["rank"],)


def _measured(daemon: Daemon, job: str, name: str, parent: str, keep: Path | None) -> MeasuredJob:
    folder = Path(parent, name)
    folder.mkdir()
    begun = time.monotonic()
    measured = measure_job(daemon, job, folder)
    print(f"  {name}: {measured.step_ms:.1f} ms a step, took {time.monotonic() - begun:.1f} s", flush=True)
    if keep:
        place = keep / name
        place.mkdir(parents=True, exist_ok=True)
        for rank, trace in enumerate(measured.traces):
            shutil.copy(trace, place / f"rank{rank}.json.gz")
        (place / "measured.json").write_text(json.dumps({"step_ms": measured.step_ms, **measured.views}, default=str))
    return measured


def _print(cause: RankCause, verdict: Verdict, planted: MeasuredJob) -> bool:
    """Prints a row and what stands behind it. Returns whether the guilty rank, or none, was told."""
    print(row(verdict))
    for found in planted.findings[:SHOWN]:
        print(f"    {found['saving_pct']:5.1f} %  rank {found['rank']}: {found['title'][:110]}")
    ranks = [entry for entry in planted.views["rank_what_if"]["rows"] if entry["rank"] is not None]
    most = max(ranks, key=lambda entry: entry["saving_pct"], default=None)
    guilty = most["rank"] if most and most["saving_pct"] > WORTH_SAYING_PCT else None
    gained = f"{most['saving_pct']:.1f} % by {most['change']}" if most else "nothing is predicted"
    right = guilty == cause.rank
    close = most is None or cause.rank is None or abs(most["saving_pct"] - verdict.share_pct) <= TOLERANCE_POINTS
    print(f"    {'' if right else 'WRONG RANK: '}{'' if close else 'WRONG SAVING: '}{gained}")
    for name in ("ranks", "stragglers"):
        about = [
            f"rank {entry['rank']} {entry.get('about') or ''}" for entry in planted.views[name]["rows"] if _told(entry)
        ]
        print(f"    {name}: {'; '.join(about) or 'nobody'}", flush=True)
    return right


def _told(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("about") or entry.get("candidate"))
