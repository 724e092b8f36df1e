"""What a reader sees first."""

from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from kineto_trace.catalog.view_runner import run_views
from kineto_trace.html.report import FirstScreen, first_requests, first_screen
from kineto_trace.store.parquet_folder import save_columns
from support.trace_files.traces import target, trace

US = 1000
H200 = Path(__file__).parents[3] / "data/h200"


def screen(*paths: Path) -> FirstScreen:
    results = run_views(first_requests(len(paths)), paths)
    return first_screen(results, len(paths))


def job(folder: Path, *targets: dict[str, Any]) -> list[Path]:
    kernels = [{"name": "k", "start": 100 * n * US, "duration": 60 * US} for n in range(3)]
    paths = [folder / f"rank{rank}" for rank in range(len(targets))]
    for rank, (path, told) in enumerate(zip(paths, targets, strict=True)):
        save_columns(trace({"kernel": kernels}, length_ns=300 * US, target=target(rank=rank, **told)), path)
    return paths


def test_of_one_trace_the_shares_of_its_gpu_come_first_and_the_cause_is_their_first_column(tmp_path: Path) -> None:
    found = screen(*job(tmp_path, {}))
    assert (found.time.view, found.time.columns[0].name) == ("time_causes", "cause")
    assert sum(found.time.values("share_pct")) == pytest.approx(100)


def test_of_several_ranks_each_finding_is_there_once_with_what_the_job_would_gain() -> None:
    found = screen(*sorted((H200 / "ddp4").iterdir()))
    titles = found.findings.values("title")
    assert titles and len(titles) == len(set(titles)) and all("on 4 of 4 ranks" in title for title in titles)
    assert sum(found.time.values("share_pct")) == pytest.approx(100)
    assert found.lead == "A step takes 19.9 ms on average (4 steps on each of 4 ranks)."


def test_facts_that_differ_over_the_ranks_are_listed_and_the_first_ones_of_many(tmp_path: Path) -> None:
    hosts = [
        {"host": f"h{rank}", "pid": 10 + rank, "world_size": 8, "command": ["python", "t.py"], "job_id": "17"}
        for rank in range(6)
    ]
    facts = dict(screen(*job(tmp_path, *hosts)).facts)
    assert facts["host"] == "h0, h1, h2, h3 and 2 more"
    assert (facts["process"], facts["ranks"]) == ("python (pids 10-15)", "6 of 8")
    assert (facts["job"], facts["command"], facts["window"]) == ("17", "python t.py", "300 µs")
    assert "GPU" not in facts and "CUDA" not in facts


def test_the_text_of_a_fact_stays_on_its_line(tmp_path: Path) -> None:
    facts = dict(screen(*job(tmp_path, {"host": "a\n\x1b[2J"})).facts)
    assert facts["host"] == r"a\x0a\x1b[2J"


def test_several_captures_of_a_rank_are_no_ranks(tmp_path: Path) -> None:
    one = sorted((H200 / "ddp4").iterdir())[0]
    found = screen(*(Path(copy(one, tmp_path / f"{number}.json.gz")) for number in range(3)))
    titles = found.findings.values("title")
    assert titles and all("in 3 of 3 captures" in title for title in titles)
    assert found.lead == "A step takes 19.9 ms on average (4 steps in each of 3 captures)."
