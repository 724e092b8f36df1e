"""What a worker answers: results over ranks as `kinetoctl report` has them, also if a rank fails."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from kineto_trace.catalog.view_runner import opened_context, run_view
from kineto_trace.errors import FileError, TraceError
from kineto_trace.model.context import Context
from kineto_trace.open.trace_discovery import Source
from kineto_trace.store.parquet_folder import save_columns
from kineto_trace.view_api.result_files import csv_bytes
from kinetoctl.output.result_tables import documents
from kinetoctl.web.analyses import trace_jobs
from kinetoctl.web.analyses.trace_jobs import TraceJobs
from support.trace_files import synthetic
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


def test_a_table_as_csv_is_that_of_a_report(tmp_path: Path) -> None:
    paths = job(tmp_path, 2)
    assert TraceJobs().csv("kernels", paths).encode() == csv_bytes(run_view("kernels", paths))
    assert TraceJobs().csv("kernels", paths, rank=1).count("\n") == 2


def test_a_comparison_as_csv_has_the_rows_of_its_page(tmp_path: Path) -> None:
    before, after = job(tmp_path / "before", 1), job(tmp_path / "after", 1)
    (found,) = TraceJobs().views(["diff_kernel_names"], after, before)
    assert TraceJobs().csv("diff_kernel_names", after, before).count("\n") == 1 + len(found["rows"])
    with pytest.raises(FileError, match="choose a baseline"):
        TraceJobs().csv("diff_kernel_names", after)


def test_csv_with_too_many_rows_is_left_to_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_jobs, "MAX_CSV_ROWS", 1)
    with pytest.raises(FileError, match="2 rows are too many for a browser: run the command at the bottom of the page"):
        TraceJobs().csv("kernels", job(tmp_path, 2))


def test_a_trace_stays_open_for_the_next_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def counted(source: Source, stack: ExitStack) -> tuple[Source, Context]:
        opened.append(source.path)
        return opened_context(source, stack)

    monkeypatch.setattr(trace_jobs, "opened_context", counted)
    jobs, paths = TraceJobs(), job(tmp_path, 1)
    for _ in range(2):
        assert len(jobs.views(["kernels"], paths)[0]["rows"]) == 1
    assert opened == [tmp_path / "rank0.kineto"]
    jobs.forget()
    jobs.views(["kernels"], paths)
    assert len(opened) == 2


def test_the_page_of_a_capture_begins_with_what_the_report_of_its_ranks_does(tmp_path: Path) -> None:
    (found,) = TraceJobs().first_screen(job(tmp_path, 2))
    assert (found["several"], found["time"]["view"]) == (True, "rank_time_causes")
    assert ("ranks", "2") in found["facts"]
    (found,) = TraceJobs().first_screen(job(tmp_path / "one", 1))
    assert (found["several"], found["time"]["view"]) == (False, "time_causes")
    json.dumps(found)


def synthetic_job(folder: Path, ranks: int = 1) -> list[str]:
    """Traces of training steps."""
    folder.mkdir()
    for rank in range(ranks):
        (folder / f"rank{rank}.json").write_text(synthetic.text(4_000, rank=rank))
    return [str(folder)]


def test_a_view_with_a_counterpart_is_compared_step_by_step(tmp_path: Path) -> None:
    one, two = synthetic_job(tmp_path / "one"), synthetic_job(tmp_path / "two")
    (found,) = TraceJobs().views(["kernels"], two, base=one, compare=["kernels"])
    assert found["compared"]["view"] == "diff_kernel_names"
    assert {row["verdict"] for row in found["compared"]["rows"]} <= {"within noise", "unknown"}


def test_other_views_are_compared_row_by_row_also_between_ranks(tmp_path: Path) -> None:
    one, two = synthetic_job(tmp_path / "one", 2), synthetic_job(tmp_path / "two", 2)
    (found,) = TraceJobs().views(["gpu_annotations"], two, base=one, rank=1, compare=["gpu_annotations"])
    rows = found["compared"]["rows"]
    assert {row["rank"] for row in rows} == {1}
    assert {row["sum_delta_us"] for row in rows} == {0.0}


def test_one_trace_is_compared_with_another_whatever_their_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        made = trace({"kernel": [{"name": "gemm", "duration": 5}]}, target=target(rank=rank))
        save_columns(made, tmp_path / f"of{rank}.kineto")
    paths = [str(tmp_path / f"of{rank}.kineto") for rank in range(2)]
    (found,) = TraceJobs().views(["kernel_breakdown"], paths[1:], base=paths[:1], compare=["kernel_breakdown"])
    (row,) = found["compared"]["rows"]
    assert (row["rank"], row["sum_delta_us"]) == (1, 0.0)


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    one, two = job(tmp_path / "one", 1), job(tmp_path / "two", 3)
    (found,) = TraceJobs().views(["memory_events"], two, base=one, compare=["memory_events"])
    assert "no counterparts" in found["compared"]["failure"]
    (found,) = TraceJobs().views(["overview"], two, base=one, rank=2, compare=["overview"])
    assert found["compared"]["rows"] and not found["compared"].get("failure")


@pytest.mark.parametrize("error", [FileError("broken"), MemoryError()])
def test_a_file_that_is_too_much_for_tracks_goes_to_the_timeline_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refused(*_arguments: object, **_options: object) -> bool:
        raise error

    path = tmp_path / "trace.json"
    path.write_text(synthetic.text(500))
    save_columns(trace({"kernel": [{"name": "gemm", "duration": 5}]}), tmp_path / "stored")
    monkeypatch.setattr(trace_jobs, "write_timeline", refused)
    wanted = str(tmp_path / "timeline.json.gz")
    found = TraceJobs().timeline([str(path)], None, wanted, tracks=True)
    assert (found["path"], found["focus"]["tracks"]) == (str(path), ["thread 4242", "stream 7"])
    with pytest.raises(type(error)):
        TraceJobs().timeline([str(tmp_path / "stored")], None, wanted, tracks=True)


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    path, whole, jobs = tmp_path / "rank0.json", synthetic.text(2_000), TraceJobs()
    path.write_text(whole[: len(whole) // 2])
    (cut,) = jobs.views(["kernels"], [str(path)])
    path.write_text(whole)
    (again,) = jobs.views(["kernels"], [str(path)])
    assert any("truncated" in note for note in cut["notes"])
    assert not any("truncated" in note for note in again["notes"])
