import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import kineto_trace
import pytest
from kineto_trace.base.quantities import free_memory
from kineto_trace.catalog import view_runner
from kineto_trace.catalog.view_runner import OF_WHOLE_TRACES, Contribution, Request, cluster, run_view, run_views
from kineto_trace.errors import FileError, TraceError, ViewError
from kineto_trace.model.trace import Losses
from kineto_trace.open.trace_discovery import Source, find_traces
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.store.parquet_folder import save_columns
from kineto_trace.view_api.view import VIEWS, Answer
from support.trace_files import job_views
from support.trace_files.job_views import FATAL, LONGEST, SPREAD
from support.trace_files.traces import target, trace


@pytest.fixture(autouse=True)
def views() -> Iterator[None]:
    job_views.register()
    yield
    job_views.unregister()


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=job_views.register) as executor:
        yield executor


def ranks(folder: Path, *durations: int) -> list[Source]:
    """One stored trace per rank, with one kernel; 0: without."""
    for rank, duration in enumerate(durations):
        kernels = [{"name": "k", "duration": duration}] if duration else []
        save_columns(trace({"kernel": kernels}, target=target(rank=rank)), folder / f"rank{rank}.kineto")
    return find_traces(folder)


def test_results_of_ranks_from_a_pool_of_processes(tmp_path: Path, processes: Executor) -> None:
    result = run_view(LONGEST, ranks(tmp_path, 5, 9, 2), executor=processes, least=4)
    assert result.rows() == [{"rank": 0, "duration": 5}, {"rank": 1, "duration": 9}, {"rank": 2, "duration": 4}]
    assert result.notes == tuple(f"rank {rank}: all kernels" for rank in range(3))


def test_a_view_over_all_ranks_gets_what_each_contributes(tmp_path: Path, processes: Executor) -> None:
    assert run_view(SPREAD, ranks(tmp_path, 5, 9, 2), executor=processes).rows() == [{"ranks": 3, "spread": 7}]


def test_several_views_open_each_trace_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def noted(path: Path) -> kineto_trace.Trace:
        opened.append(path)
        return open_trace(path)

    monkeypatch.setattr(view_runner, "open_trace", noted)
    sources = ranks(tmp_path, 5, 9)
    results = run_views([LONGEST, Request(view=LONGEST, options={"least": 7}), SPREAD], sources)
    assert [result.table["duration"].to_pylist() for result in results[:2]] == [[5, 9], [7, 9]]
    assert results[2].rows() == [{"ranks": 2, "spread": 4}]
    assert opened == [source.path for source in sources]


def test_a_rank_that_cannot_be_read_is_missing_and_said(tmp_path: Path, processes: Executor) -> None:
    sources = ranks(tmp_path, 5, 9, 2)
    (tmp_path / "rank1.kineto" / "kernel.parquet").unlink()
    result = run_view(SPREAD, sources, executor=processes)
    assert result.rows() == [{"ranks": 2, "spread": 3}]
    (note,) = result.notes
    assert note.startswith(f"rank 1 is missing: {tmp_path}/rank1.kineto: cannot read the stored trace")


def test_a_rank_on_which_a_view_fails_is_missing_in_that_view_alone(tmp_path: Path) -> None:
    longest, spread = run_views([LONGEST, SPREAD], ranks(tmp_path, 5, 0, 2))
    assert longest.values("rank") == [0, 2]
    assert f"rank 1 is missing: {tmp_path}/rank1.kineto: there are no kernels" in longest.notes
    assert (spread.rows(), spread.notes) == ([{"ranks": 3, "spread": 5}], ())


def test_a_view_that_fails_on_the_only_trace_does_not_take_the_others_down(tmp_path: Path) -> None:
    longest, spread = run_views([LONGEST, SPREAD], ranks(tmp_path, 0))
    assert longest.rows() == []
    assert longest.failure == (
        f"view {LONGEST} failed: {tmp_path}/rank0.kineto: there are no kernels; the other views are complete"
    )
    assert (spread.rows(), spread.failure) == ([{"ranks": 1, "spread": 0}], "")


def test_a_view_that_fails_over_all_ranks_does_not_take_the_others_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_partials: object) -> Answer:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(VIEWS, SPREAD, replace(VIEWS[SPREAD], reduce=broken))
    longest, spread = run_views([LONGEST, SPREAD], ranks(tmp_path, 5, 9))
    assert longest.values("duration") == [5, 9]
    assert spread.failure.startswith(f"view {SPREAD} failed: ZeroDivisionError: division by zero (test_view_runner.py:")


def test_if_every_view_fails_that_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there are no kernels"):
        run_views([LONGEST, Request(view=LONGEST, options={"least": 7})], ranks(tmp_path, 0))


@pytest.mark.slow
def test_a_worker_that_dies_takes_no_other_rank_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = ranks(tmp_path, 5, 9, 2)
    spawn = get_context("spawn")
    monkeypatch.setattr(
        view_runner,
        "pool",
        lambda sources, workers: ProcessPoolExecutor(1, mp_context=spawn, initializer=job_views.register),
    )
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=job_views.register) as executor:
        result = run_view(FATAL, sources, executor=executor)
    assert result.values("rank") == [0, 2]
    assert "rank 1 is missing" in result.notes[0]
    assert "the process that was reading it ran out of memory and died" in result.notes[0]


def test_a_rank_that_needs_more_than_its_part_of_the_memory_is_read_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contribute, tried = view_runner.contribute, list[Path]()

    def greedy(source: Source, requests: Sequence[Request]) -> Contribution:
        tried.append(source.path)
        if source.rank == 1 and tried.count(source.path) == 1:
            return view_runner.unopened(source, requests, MemoryError("it needs more"))
        return contribute(source, requests)

    monkeypatch.setattr(view_runner, "contribute", greedy)
    monkeypatch.setattr(view_runner, "pool", lambda sources, workers: ThreadPoolExecutor(workers))
    with ThreadPoolExecutor(1) as executor:
        result = run_view(LONGEST, ranks(tmp_path, 5, 9, 2), executor=executor)
    assert result.values("duration") == [5, 9, 2]
    assert sorted(tried.count(path) for path in set(tried)) == [1, 1, 2]


def test_a_worker_that_dies_before_all_ranks_are_handed_over_takes_none_of_them_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_runner, "pool", lambda sources, workers: ThreadPoolExecutor(workers))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        assert isinstance(executor.submit(os._exit, 9).exception(), BrokenProcessPool)
        assert run_view(LONGEST, ranks(tmp_path, 5, 9), executor=executor).values("duration") == [5, 9]


def test_if_all_fail_that_is_an_error(tmp_path: Path) -> None:
    sources = ranks(tmp_path, 0, 0)
    with pytest.raises(FileError, match=r"failed on all 2 traces; the first error: .*rank0.kineto: there are no kern"):
        run_view(LONGEST, sources)


def test_the_error_of_a_single_trace_is_the_callers(tmp_path: Path) -> None:
    (source,) = ranks(tmp_path, 0)
    with pytest.raises(TraceError, match=r"^there are no kernels$"):
        run_view(LONGEST, source)
    with pytest.raises(FileError, match="does not exist"):
        run_view(LONGEST, tmp_path / "none")


def test_what_is_wrong_with_the_question_is_said_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ViewError, match="no view is called 'nothing'"):
        run_view("nothing", tmp_path)
    with pytest.raises(ViewError, match="has no option most; available: least"):
        run_view(LONGEST, tmp_path, most=3)
    with pytest.raises(ViewError, match="compat='nsys' is not valid; use one of none, plugin, hta"):
        run_view(LONGEST, tmp_path, compat="nsys")
    with pytest.raises(ViewError, match="cannot reproduce the figures of hta"):
        run_view(LONGEST, tmp_path, compat="hta")
    with pytest.raises(FileError, match="no trace was given"):
        run_view(LONGEST, [])


def test_a_rank_that_is_there_twice_counts_twice_and_is_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_columns(trace({"kernel": [{"name": "k", "duration": 3}]}, target=target(rank=4)), tmp_path / name)
    result = run_view(LONGEST, [tmp_path])
    assert result.values("rank") == [4, 4]
    assert f"rank 4 has 2 traces, and all of them are counted: {tmp_path}/a, {tmp_path}/b" in result.notes


def test_an_opened_trace_and_its_context_will_do() -> None:
    opened = trace({"kernel": [{"name": "k", "duration": 3}]}, target=target(rank=4), notes=("2 events were cut off",))
    assert run_view(LONGEST, opened).rows() == [{"rank": 4, "duration": 3}]
    result = run_view(LONGEST, kineto_trace.Context(opened, rank=6))
    assert (result.values("rank"), result.notes) == ([6], ("all kernels", "2 events were cut off"))


CUT = "the file is truncated in its list of events, after 2 events of an unknown number"
FALSE_SHARES = "not shown: whole kinds of activities may be missing in a truncated file, so its shares would be wrong"


@pytest.mark.parametrize("view", sorted(OF_WHOLE_TRACES))
def test_a_truncated_trace_has_no_shares_of_the_steps(tmp_path: Path, view: str) -> None:
    cut = trace({"cpu_op": [{"name": "aten::mm", "duration": 5, "thread": 1}]}, notes=(CUT,))
    save_columns(cut, tmp_path / "cut.kineto")
    for found in (cut, [tmp_path / "cut.kineto"]):
        result = run_view(view, found)
        assert (len(result), result.notes) == (0, (FALSE_SHARES, CUT))


def test_a_truncated_rank_has_no_share_in_the_figures_of_its_job(tmp_path: Path) -> None:
    for rank, notes in enumerate([(), (CUT,)]):
        kernel = {"name": "gemm", "duration": 5 + rank}
        save_columns(
            trace({"kernel": [kernel]}, target=target(rank=rank), notes=notes), tmp_path / f"rank{rank}.kineto"
        )
    result = run_view("time_causes", find_traces(tmp_path))
    assert set(result.values("rank")) == {0}
    assert f"rank 1: {FALSE_SHARES}" in result.notes and f"rank 1: {CUT}" in result.notes
    assert set(run_view("rank_time_causes", find_traces(tmp_path)).values("most_rank")) == {0}


def test_what_a_trace_lost_is_a_note_of_its_figures() -> None:
    lost = trace({}, losses=Losses(dropped=3, undecoded=2, torn=1), notes=("odd",))
    assert lost.remarks == (
        "odd",
        "3 activities were lost in the traced process: its buffers were full",
        "2 recorded activities could not be decoded",
        "the end of the recording was cut off",
    )


def test_a_process_has_one_trace_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    most: list[int] = []

    def slowly(path: Path) -> kineto_trace.Trace:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)  # long enough for another thread to come in, if it could
        inside.pop()
        return open_trace(path)

    monkeypatch.setattr(view_runner, "open_trace", slowly)
    with ThreadPoolExecutor(3) as executor:
        assert len(run_view(LONGEST, ranks(tmp_path, 1, 2, 3), executor=executor)) == 3
    assert max(most) == 1


def test_a_pool_has_no_more_workers_than_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1000 kB\n")
    free = free_memory(tmp_path)
    assert free == 1_024_000
    assert free_memory(tmp_path / "none") == float("inf")
    file = tmp_path / "trace.json"
    file.write_bytes(bytes(200_000))
    monkeypatch.setattr(view_runner, "free_memory", lambda: free)
    assert view_runner._fitting([Source(path=file, rank=0)]) == 3
    assert view_runner.text_bytes(Source(path=tmp_path / "gone", rank=0)) == 0


@pytest.mark.slow
def test_large_traces_are_worked_on_by_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = ranks(tmp_path, 3, 4)
    monkeypatch.setattr(view_runner, "SMALL_JOB_BYTES", 0)
    monkeypatch.setattr(view_runner, "_cores", lambda: 2)
    monkeypatch.setattr(view_runner, "open_trace", lambda path: pytest.fail("opened by the caller"))
    assert run_view("kernels", sources).values("rank") == [0, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_does_the_same(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    sources = ranks(tmp_path, 5, 0, 2)
    local = distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
    with local, distributed.Client(local) as client, cluster(local.scheduler_address) as executor:
        client.run(job_views.register)
        result = run_view(LONGEST, sources, executor=executor)
        assert result.values("duration") == [5, 2]
        assert "rank 1 is missing" in result.notes[2]


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_without_workers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(view_runner, "WORKERS_S", 0.1)
    local = distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=None)
    with local, pytest.raises(TraceError, match="has no workers: start some with `dask worker"):  # noqa: SIM117
        with cluster(local.scheduler_address):
            pass


def test_a_note_that_many_ranks_have_is_there_once(tmp_path: Path) -> None:
    sources = ranks(tmp_path, 5, 9, 0, 2, 4, 1)
    result = run_view(LONGEST, sources)
    assert result.notes == (
        "ranks 0-1, 3-5: all kernels",
        f"rank 2 is missing: {tmp_path}/rank2.kineto: there are no kernels",
    )


def test_a_scheduler_that_cannot_be_reached_is_an_error() -> None:
    with pytest.raises(TraceError, match="cannot reach the Dask scheduler at nowhere"), cluster("nowhere"):
        pass
