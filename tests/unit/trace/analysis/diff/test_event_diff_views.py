from typing import Any

import pytest
from kineto_trace.analysis.diff.event_diff_views import diff_events
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Compat
from support.trace_files.hta_events import Event, context, gpu, launch, step
from support.trace_files.hta_events import op as op_event
from support.trace_files.traces import trace

Row = dict[str, Any]
US = 1000


def op(start: int, duration: int, name: str, number: int) -> Row:
    row = {"start": start * US, "duration": duration * US, "name": name, "thread": 1, "id": number, "finished": 1}
    return {**row, "inputs": -1, "sequence": -1}


def side(first: int, second: int, *, kernel: int = 10) -> Context:
    """Two steps with so many calls of aten::mm; each calls the runtime, and has a kernel much later."""
    ops, calls, kernels = [], [], []
    for number in range(first + second):
        at = 100 + 10 * number if number < first else 1100 + 10 * number
        ops.append(op(at, 5, "aten::mm", number + 1))
        call = {"start": (at + 1) * US, "duration": 2 * US, "name": "cudaLaunchKernel", "thread": 1}
        calls.append({**call, "correlation": number + 1})
        at = 5000 + 100 * number
        row = {"start": at * US, "duration": kernel * US, "name": "gemm", "correlation": number + 1, "stream": 7}
        kernels.append(row)
    steps = [
        op(0, 1000, "ProfilerStep#1", 90),
        op(1000, 1000, "ProfilerStep#2", 91),
        op(2000, 100, "ProfilerStep#3", 92),
    ]
    tables = {"user_annotation": steps, "cpu_op": ops, "cuda_runtime": calls, "kernel": kernels}
    return Context(trace(tables, length_ns=10_000 * US))


def shown(**options: Any) -> dict[str, tuple[int, int, float, str]]:
    rows = diff_events(side(2, 1), side(3, 0, kernel=20), **options).rows()
    return {
        row["name"]: (row["calls_baseline"], row["calls_other"], row["total_delta_us"], row["change"]) for row in rows
    }


def test_events_of_all_kinds_are_compared_by_name() -> None:
    found = shown()
    assert found["aten::mm"] == (3, 3, 0, "unchanged")
    assert found["gemm"] == (3, 3, 30, "unchanged")
    assert found["ProfilerStep#1"] == (1, 1, 0, "unchanged")


def test_one_side_of_the_machine_can_be_asked_for() -> None:
    assert list(shown(device="gpu")) == ["gemm"]
    assert "gemm" not in shown(device="cpu")


def test_gpu_work_belongs_to_the_step_of_its_call() -> None:
    assert shown(step=1)["gemm"] == (2, 3, 40, "increased")
    assert shown(step=2)["gemm"] == (1, 0, -10, "deleted")


def test_hta_compares_the_first_step() -> None:
    found = shown(compat=Compat.HTA)
    assert found["gemm"] == (2, 3, 40, "increased")
    assert found["aten::mm"] == (2, 3, 5, "increased")
    assert "ProfilerStep#2" not in found


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ViewError, match="no step 9"):
        shown(step=9)
    with pytest.raises(ViewError, match="use one of all, cpu, gpu"):
        shown(device="tpu")
    with pytest.raises(ViewError, match="HTA compares one step"):
        diff_events(Context(trace({})), Context(trace({})), compat=Compat.HTA)


def hta(*events: Event) -> Context:
    return context([*events])


def test_hta_compares_the_last_step_too_and_each_trace_can_have_its_own() -> None:
    left = hta(step(1, 0, 10), op_event("a", 2, 3), step(2, 10, 10), op_event("a", 12, 4), op_event("a", 17, 1))
    right = hta(step(5, 0, 10), op_event("a", 2, 9))
    found = diff_events(left, right, compat=Compat.HTA, step=2, other_step=5).rows()
    row = next(row for row in found if row["name"] == "a")
    assert (row["calls_baseline"], row["calls_other"], row["total_delta_us"]) == (2, 1, 4)


def test_variants_of_a_kernel_are_one_by_their_short_names() -> None:
    events = [step(1, 0, 10), launch(1, 1), launch(2, 3), launch(3, 5)]
    names = ("void ns::add<int>(int*)", "void ns::add<float>(float*)", "Memcpy DtoH (Device -> Pageable)")
    side = hta(*events, *(gpu(name, 20 + 5 * n, 2, n) for n, name in enumerate(names, 1)))
    found = diff_events(side, side, compat=Compat.HTA, device="gpu", short_names=True).rows()
    assert {row["name"]: row["calls_baseline"] for row in found} == {"ns::add": 2, names[2]: 1}
