import pytest
from kineto_trace.analysis.diff.diff_views import diff_kernels, diff_ops, diff_steps
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from support.trace_files.traces import trace


def op(start: int, duration: int, name: str, number: int) -> dict[str, object]:
    return {"start": start, "duration": duration, "name": name, "thread": 1, "id": number, "finished": 1}


def side(*, mm: int, kernel_ns: int, extra: str) -> Context:
    """`mm` calls of aten::mm of 1000 ns, each with one kernel; and one call of another operator."""
    kernels, calls, ops = [], [], []
    for number in range(mm):
        start = 10_000 * number
        ops.append(op(start, 1000, "aten::mm", number + 1))
        calls.append({"start": start + 100, "duration": 200, "name": "cudaLaunchKernel", "thread": 1})
        calls[-1]["correlation"] = number + 1
        kernels.append({"start": start + 2000, "duration": kernel_ns, "name": "gemm", "correlation": number + 1})
    ops.append(op(900_000, 500, extra, 99))
    steps = [op(0, 100_000 * mm, "ProfilerStep#4", 100)]
    return Context(trace({"cpu_op": ops, "user_annotation": steps, "cuda_runtime": calls, "kernel": kernels}))


def test_operators_of_two_traces_stand_beside_each_other() -> None:
    found = diff_ops(side(mm=2, kernel_ns=3000, extra="old"), side(mm=1, kernel_ns=9000, extra="new")).rows()
    assert [(row["name"], row["change"]) for row in found] == [
        ("aten::mm", "decreased"),
        ("new", "added"),
        ("old", "deleted"),
    ]
    mm = found[0]
    assert (mm["calls_baseline"], mm["calls_other"], mm["calls_delta"]) == (2, 1, -1)
    assert (mm["device_total_baseline_us"], mm["device_total_other_us"]) == (6.0, 9.0)
    assert (mm["device_self_delta_us"], mm["device_self_delta_pct"]) == (3.0, 50.0)
    assert (mm["host_total_baseline_us"], mm["host_self_baseline_us"]) == (2.0, 1.6)
    assert (found[1]["host_total_baseline_us"], found[1]["host_total_delta_pct"]) == (0.0, None)


def test_kernels_of_two_traces_stand_beside_each_other() -> None:
    found = diff_kernels(side(mm=2, kernel_ns=3000, extra="x"), side(mm=2, kernel_ns=4000, extra="x")).rows()
    assert len(found) == 1
    assert (found[0]["name"], found[0]["change"], found[0]["total_delta_us"]) == ("gemm", "unchanged", 2.0)
    assert (found[0]["mean_baseline_us"], found[0]["mean_other_us"]) == (3.0, 4.0)


def test_steps_are_compared_in_their_order_and_on_average() -> None:
    found = diff_steps(side(mm=2, kernel_ns=1, extra="x"), side(mm=1, kernel_ns=1, extra="x")).rows()
    assert [(row["step"], row["number_baseline"], row["duration_delta_us"]) for row in found] == [
        ("1", 4, -100.0),
        ("mean", None, -100.0),
    ]


def test_steps_of_a_trace_without_steps_are_missing() -> None:
    found = diff_steps(side(mm=1, kernel_ns=1, extra="x"), Context(trace({})))
    assert [(row["step"], row["duration_other_us"]) for row in found.rows()] == [("1", None)]
    assert found.notes


def test_a_diff_of_one_trace_is_refused() -> None:
    with pytest.raises(ViewError, match="exactly two traces, not 1"):
        find_view("diff_operators")(Context(trace({})))


def test_two_empty_traces_have_no_difference() -> None:
    empty = Context(trace({}))
    assert len(diff_ops(empty, empty)) == len(diff_kernels(empty, empty)) == len(diff_steps(empty, empty)) == 0
