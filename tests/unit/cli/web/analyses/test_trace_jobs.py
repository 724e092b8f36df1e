"""What a worker answers: results over ranks as `kinetoctl report` has them, also if a rank fails."""

import json
from pathlib import Path

import pytest
from kineto_trace.catalog.view_runner import run_view
from kineto_trace.errors import TraceError
from kineto_trace.store.parquet_folder import save_columns
from kinetoctl.output.result_tables import documents
from kinetoctl.web.analyses.trace_jobs import TraceJobs
from support.trace_files.traces import target, trace


def job(folder: Path, ranks: int) -> list[str]:
    """A stored trace of each rank, with one kernel and without operators."""
    for rank in range(ranks):
        made = trace({"kernel": [{"name": "gemm", "duration": 5}]}, target=target(rank=rank))
        save_columns(made, folder / f"rank{rank}.kineto")
    return [str(folder)]


def test_a_rank_that_cannot_be_read_is_missing_and_said(tmp_path: Path) -> None:
    paths = job(tmp_path, 3)
    (tmp_path / "rank1.kineto" / "kernel.parquet").unlink()
    (found,) = TraceJobs().views(["kernels"], paths)
    assert [row["rank"] for row in found["rows"]] == [0, 2]
    (note,) = (note for note in found["notes"] if "missing" in note)
    assert note.startswith(f"rank 1 is missing: {tmp_path}/rank1.kineto: cannot read the stored trace")


def test_the_only_trace_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    paths = job(tmp_path, 1)
    (tmp_path / "rank0.kineto" / "kernel.parquet").unlink()
    with pytest.raises(TraceError, match="cannot read the stored trace"):
        TraceJobs().views(["kernels", "overview"], paths)


def test_a_note_of_many_ranks_is_one_note(tmp_path: Path) -> None:
    (found,) = TraceJobs().views(["memory_events"], job(tmp_path, 5))
    (note,) = found["notes"]
    assert note.startswith("ranks 0-4: the trace has no allocations")


def test_a_result_is_that_of_a_report(tmp_path: Path) -> None:
    paths = job(tmp_path, 2)
    (found,) = TraceJobs().views(["kernels"], paths)
    report = documents({"kernels": run_view("kernels", paths)})["kernels"]
    assert {name: found[name] for name in report} == json.loads(json.dumps(report))


def test_a_trace_stays_open_for_the_next_view(tmp_path: Path) -> None:
    jobs, paths = TraceJobs(), job(tmp_path, 1)
    jobs.views(["kernels"], paths)
    (tmp_path / "rank0.kineto" / "kernel.parquet").unlink()
    assert len(jobs.views(["kernels"], paths)[0]["rows"]) == 1
    jobs.forget()
    with pytest.raises(TraceError):
        jobs.views(["kernels"], paths)
