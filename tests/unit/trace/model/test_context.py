"""Events that end before they begin, as some profilers wrote them."""

from pathlib import Path

from kineto_trace import open_trace, run_view
from kineto_trace.model.context import Context, with_possible_times
from kineto_trace.model.trace import Trace
from kineto_trace.store.parquet_folder import load_columns, save_columns
from support.trace_files import traces


def kernels(*durations: int) -> Trace:
    rows = [{"name": "gemm", "start": 1000 * n, "duration": us * 1000} for n, us in enumerate(durations)]
    return traces.trace({"kernel": rows})


def test_a_negative_duration_counts_as_0_and_is_told() -> None:
    result = run_view("kernels", Context(kernels(3, -5)))
    (row,) = result.rows()
    assert (row["calls"], row["total_us"], row["min_us"], row["share_pct"]) == (2, 3, 0, 100)
    assert "1 event has a negative duration: counted as 0" in result.notes


def test_of_a_stored_trace_negative_durations_count_as_0_too_and_stay_as_they_are_in_the_store(tmp_path: Path) -> None:
    save_columns(kernels(3, -5), tmp_path)
    stored = load_columns(tmp_path)
    context = Context(stored)
    (row,) = run_view("kernels", context).rows()
    assert (row["calls"], row["total_us"], row["min_us"], row["share_pct"]) == (2, 3, 0, 100)
    assert stored.table("kernel")["duration"].tolist() == [3000, -5000]
    assert list(context.trace.tables) == list(stored.tables)
    assert len(context.trace.table("cpu_op")) == 0


def test_a_trace_whose_every_event_ends_before_it_begins_lasts_for_no_time(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('[{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":7,"dur":-5000}]')
    rows = run_view("step_phases", Context(open_trace(tmp_path / "t.json"))).rows()
    assert {row["total_us"] for row in rows} <= {0}


def test_a_trace_without_negative_durations_stays_as_it_is() -> None:
    trace = kernels(3, 0)
    assert with_possible_times(trace) is trace
