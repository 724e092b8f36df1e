from typing import Any

import pytest
from kineto_trace import run_view
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from support.trace_files.hta_events import context, event, gpu, launch, op, step

EVENTS = [
    step(7, 0, 100),
    step(8, 100, 100),
    op("aten::mm", 10, 20),
    op("aten::t", 12, 2),
    launch(1, 15),
    gpu("gemm", 40, 30, 1),
    op("aten::add", 50, 5),
    op("aten::mm", 110, 20),
    launch(2, 115),
    gpu("gemm", 205, 30, 2),
    gpu("unlaunched", 300, 0, 99, stream=9),
]


@pytest.fixture(scope="module")
def some() -> Context:
    return context(EVENTS)


def selected(some: Context, **options: Any) -> list[str]:
    return [str(name) for name in run_view("event_selection", some, **options).values("name")]


def test_all_events_by_start(some: Context) -> None:
    rows = run_view("event_selection", some).rows()
    assert len(rows) == len(EVENTS)
    assert [(row["name"], row["iteration"], row["op"]) for row in rows if row["kind"] == "kernel"] == [
        ("gemm", 7, "aten::mm"),
        ("gemm", 8, "aten::mm"),
        ("unlaunched", None, None),
    ]
    assert rows[0] == {
        "rank": 0,
        "kind": "user_annotation",
        "name": "ProfilerStep#7",
        "iteration": 7,
        "start_ns": rows[0]["start_ns"],
        "time_us": 0,
        "duration_us": 100,
        "thread": rows[0]["thread"],
        "device": None,
        "stream": None,
        "op": None,
    }


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kind": ["gpu"]}, ["gemm", "gemm", "unlaunched"]),
        ({"kind": ["cpu_op"], "iteration": [8]}, ["aten::mm"]),
        ({"kind": ["cpu_op"], "iteration_index": [-1]}, ["aten::mm"]),
        ({"kind": ["kernel"], "iteration_index": [0]}, ["gemm"]),
        ({"name": "aten::m"}, ["aten::mm", "aten::mm"]),
        ({"name": "mm"}, []),
        ({"kind": ["cpu_op"], "start_us": 11, "end_us": 55}, ["aten::t", "aten::add"]),
        ({"kind": ["kernel"], "min_us": 0.001}, ["gemm", "gemm"]),
        ({"stream": [9]}, ["unlaunched"]),
        ({"op": "aten::mm", "kind": ["cpu_op"]}, ["aten::mm", "aten::t"]),
        ({"op": "aten::mm", "with_kernels": True}, ["aten::mm", "aten::t", "cudaLaunchKernel", "gemm"]),
        (
            {"op": "aten::mm", "where": "before", "position": -1, "kind": ["cpu_op"]},
            ["aten::mm", "aten::t", "aten::add"],
        ),
        ({"op": "aten::mm", "where": "after", "kind": ["cpu_op"]}, ["aten::add", "aten::mm"]),
    ],
    ids=str,
)
def test_conditions(some: Context, options: dict[str, Any], names: list[str]) -> None:
    assert selected(some, **options) == names


def test_more_than_the_limit_is_told(some: Context) -> None:
    result = run_view("event_selection", some, limit=2)
    assert (len(result), result.notes) == (2, ("11 events match; only the first 2 are listed (limit=0 lists all)",))
    assert len(run_view("event_selection", some, limit=0)) == 11


def test_nothing_that_fits_is_told(some: Context) -> None:
    assert run_view("event_selection", some, name="none").notes == ("no event in the trace meets all conditions",)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": ["kernels"]}, "kind=kernels is not valid"),
        ({"name": "("}, "not a regular expression"),
        ({"iteration_index": [2]}, "the trace has 2 steps, so iteration_index=2 is out of range"),
        ({"op": "aten::mm", "position": 2}, "'aten::mm' ran 2 times"),
    ],
    ids=str,
)
def test_conditions_that_cannot_hold_are_errors(some: Context, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ViewError, match=why):
        run_view("event_selection", some, **options)


def test_a_copy_is_found_by_its_kind_and_name() -> None:
    copy = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 5, 1, 0, 7)
    assert selected(context([copy, gpu("k", 8, 1, 1)]), kind=["gpu_memcpy"], name="Memcpy HtoD") == [copy["name"]]
