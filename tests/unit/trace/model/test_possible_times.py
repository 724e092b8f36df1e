"""Events that end before they begin, as some profilers wrote them."""

from kineto_trace import run_view
from kineto_trace.model.context import Context
from kineto_trace.model.possible_times import with_possible_times
from kineto_trace.model.trace import Trace
from support.trace_files import traces


def kernels(*durations: int) -> Trace:
    rows = [{"name": "gemm", "start": 1000 * n, "duration": us * 1000} for n, us in enumerate(durations)]
    return traces.trace({"kernel": rows})


def test_a_negative_duration_counts_as_0_and_is_told() -> None:
    result = run_view("kernels", Context(kernels(3, -5)))
    (row,) = result.rows()
    assert (row["calls"], row["total_us"], row["min_us"], row["share_pct"]) == (2, 3, 0, 100)
    assert "1 event has a negative duration: 0 is taken" in result.notes


def test_a_trace_without_negative_durations_stays_as_it_is() -> None:
    trace = kernels(3, 0)
    assert with_possible_times(trace) is trace
