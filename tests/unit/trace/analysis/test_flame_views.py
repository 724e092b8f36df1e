"""The stacks of small traces: by operators, GPU work, calls and samples, of one step, thread and state."""

from typing import Any

import pytest
from kineto_trace.analysis.flame_trees import NS, SAMPLES, FlameKind, FlameNode, folded, keys, timed_tree
from kineto_trace.analysis.flame_views import (
    GPU_SUBJECTS,
    FlameChoice,
    FlameSubject,
    merged_profile,
    timed_profile,
)
from kineto_trace.catalog.view_runner import run_view
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from support.trace_files.traces import START_NS, target, trace

OP = {"thread": 70, "sequence": -1, "finished": 1, "inputs": -1}
ROWS: dict[str, list[dict[str, Any]]] = {
    "user_annotation": [
        {**OP, "start": 0, "duration": 1000, "name": "ProfilerStep#4", "id": 1},
        {**OP, "start": 1000, "duration": 1000, "name": "ProfilerStep#5", "id": 2},
    ],
    "cpu_op": [
        {**OP, "start": 100, "duration": 300, "name": "aten::linear", "id": 3},
        {**OP, "start": 150, "duration": 100, "name": "aten::mm", "id": 4},
        {**OP, "start": 1100, "duration": 500, "name": "aten::linear", "id": 5},
        {**OP, "start": 0, "duration": 50, "name": "aten::mm", "id": 6, "thread": 80},
    ],
    "cuda_runtime": [
        {"start": 160, "duration": 10, "name": "cudaLaunchKernel", "thread": 70, "correlation": 1},
        {"start": 1160, "duration": 10, "name": "cudaLaunchKernel", "thread": 70, "correlation": 2},
    ],
    "kernel": [
        {"start": 1300, "duration": 40, "name": "gemm", "stream": 7, "correlation": 1},
        {"start": 1600, "duration": 2, "name": "gemm", "stream": 7, "correlation": 2},
        {"start": 1900, "duration": 7, "name": "lost", "stream": 7, "correlation": 9},
    ],
}
FRAME = {"thread": 70, "parent": -1}
SAMPLED: list[dict[str, Any]] = [
    {
        **FRAME,
        "start": 0,
        "duration": 1000,
        "name": "main",
        "samples": 10,
        "self_samples": 4,
        "idle": 3,
        "idle_lock": 3,
    },
    {**FRAME, "start": 100, "duration": 400, "name": "f", "samples": 6, "self_samples": 6, "parent": 0, "depth": 1}
    | {"running": 4, "waiting": 2, "lines": "7: 4 running, 2 waiting"},
]


def stacks(rows: dict[str, list[dict[str, Any]]], *shown: str, changes: Any = (), **options: Any) -> list[Any]:
    result = run_view("flame_graph", trace(rows, length_ns=3000, **dict(changes)), **options)
    columns = shown or ("self_us",)
    return [(" ".join(row["stack"]), *(row[name] for name in columns)) for row in result.rows()]


def test_operators_are_merged_over_the_steps_with_self_times() -> None:
    assert stacks(ROWS, "self_us", "kind") == [
        ("thread 70 ProfilerStep", 1.2, "annotation"),
        ("thread 70 ProfilerStep aten::linear", 0.7, "operator"),
        ("thread 70 ProfilerStep aten::linear aten::mm", 0.1, "operator"),
        ("thread 80 aten::mm", 0.05, "operator"),
    ]


def test_one_step_is_cut_out_of_everything() -> None:
    assert stacks(ROWS, step=5) == [
        ("thread 70 ProfilerStep", 0.5),
        ("thread 70 ProfilerStep aten::linear", 0.5),
    ]
    assert stacks(ROWS, of="kernels", step=4) == [
        ("thread 70 ProfilerStep aten::linear aten::mm gemm", 0.04)  # it ran in the next step, launched in this one
    ]


def test_what_runs_beyond_a_step_counts_up_to_its_end() -> None:
    late = {**OP, "start": 900, "duration": 400, "name": "late", "id": 7, "thread": 80}
    rows = {**ROWS, "cpu_op": [*ROWS["cpu_op"], late]}
    assert ("thread 80 late", 0.1) in stacks(rows, step=4)
    assert ("thread 80 late", 0.3) in stacks(rows, step=5)


def test_one_thread_is_all_there_is_of_it() -> None:
    assert stacks(ROWS, thread=80) == [("thread 80 aten::mm", 0.05)]


def test_gpu_work_is_below_what_launched_it() -> None:
    assert stacks(ROWS, of="kernels") == [
        ("thread 70 ProfilerStep aten::linear aten::mm gemm", 0.04),
        ("launch not in the trace lost", 0.007),
        ("thread 70 ProfilerStep aten::linear gemm", 0.002),
    ]


def test_small_stacks_are_one_row_if_wanted() -> None:
    found = stacks(ROWS, "self_us", "stacks", of="kernels", least=20)
    assert found == [("thread 70 ProfilerStep aten::linear aten::mm gemm", 0.04, 1), ("(others)", 0.009, 2)]


def test_samples_tell_running_waiting_and_idle_apart_and_idle_ones_are_counted() -> None:
    changes = (("sample_period_ns", 10_000),)
    rows = {"python_function": SAMPLED}
    assert stacks(rows, "self_us", "kind", of="python", changes=changes) == [
        ("thread 70 main f line 7", 40.0, "function"),
        ("thread 70 main f line 7 waiting for the GIL", 20.0, "waiting"),
        ("thread 70 main", 10.0, "function"),
    ]
    with_idle = stacks(rows, "self_us", "kind", of="python", idle=True, changes=changes)
    assert ("thread 70 main idle: lock", 30.0, "idle") in with_idle
    result = run_view("flame_graph", trace(rows, sample_period_ns=10_000), of="python")
    assert result.notes == ("3 samples of idle threads are left out",)


def test_samples_without_a_known_interval_are_numbers() -> None:
    found = stacks({"python_function": SAMPLED}, "self_us", "samples", of="python")
    assert found[0] == ("thread 70 main f line 7", None, 4)
    profile = merged_profile(Context(trace({"python_function": SAMPLED})), FlameChoice(of=FlameSubject.PYTHON))
    assert profile.unit == SAMPLES


def test_exact_python_calls_have_self_times() -> None:
    calls = [{**row, "samples": 0, "self_samples": 0, "idle": 0, "idle_lock": 0, "waiting": 0} for row in SAMPLED]
    assert stacks({"python_function": calls}, of="python") == [("thread 70 main", 0.6), ("thread 70 main f", 0.4)]


def test_what_a_trace_does_not_have_is_said() -> None:
    for of, what in (("ops", "operators"), ("python", "Python"), ("kernels", "GPU work"), ("modules", "modules")):
        result = run_view("flame_graph", trace({}), of=of)
        assert len(result) == 0
        assert what in result.notes[0]


def _module(start: int, duration: int, name: str, number: int, parent: int = -1) -> dict[str, Any]:
    return {**FRAME, "start": start, "duration": duration, "name": f"nn.Module: {name}", "module": number} | {
        "parent": parent
    }


# Net runs in both steps, and Linear in it around the launch of gemm; the launch of the second step is outside of both.
MODULES = {**ROWS, "python_function": [
    _module(50, 450, "Net_0", 0), _module(120, 200, "Linear_0", 1, 0), _module(1000, 100, "Net_0", 0),
]}  # fmt: skip


def test_modules_alone_have_their_time_on_the_host() -> None:
    assert stacks(MODULES, "self_us", "kind", of="modules") == [
        ("thread 70 Net_0", 0.35, "module"),
        ("thread 70 Net_0 Linear_0", 0.2, "module"),
    ]
    assert stacks(MODULES, of="modules", step=5) == [("thread 70 Net_0", 0.1)]


def test_modules_alone_have_the_gpu_time_that_was_launched_in_them_and_the_rest_is_said() -> None:
    assert stacks(MODULES, of="modules_gpu") == [("thread 70 Net_0 Linear_0", 0.04)]
    result = run_view("flame_graph", trace(MODULES, length_ns=3000), of="modules_gpu")
    assert result.notes == (
        "9 ns of GPU time comes from work launched outside any module, for example by the backward pass or the "
        "optimizer",
    )
    of_step = run_view("flame_graph", trace(MODULES, length_ns=3000), of="modules_gpu", step=4)
    assert ([row["stack"][-1] for row in of_step.rows()], of_step.notes) == (["Linear_0"], ())


def test_modules_in_order_of_time_are_where_they_ran_and_gpu_time_is_side_by_side() -> None:
    assert shape(timed(FlameSubject.MODULES, rows=MODULES))[3] == [
        (
            "thread 70",
            0,
            1050,
            [("Net_0", 0, 450, [("Linear_0", 70, 200, [])]), ("Net_0", 950, 100, [])],
        )
    ]
    assert [(child.name, child.total) for child in timed(FlameSubject.MODULES_GPU, rows=MODULES).children] == [
        ("thread 70", 40)
    ]


def test_values_that_there_are_not_are_refused() -> None:
    with pytest.raises(ViewError, match="of='cpu' is not valid; use one of python, ops, kernels, modules, modules_gpu"):
        run_view("flame_graph", trace(ROWS), of="cpu")
    with pytest.raises(ViewError, match="no step 6; its steps: 4, 5"):
        run_view("flame_graph", trace(ROWS), step=6)


def shape(node: FlameNode) -> Any:
    return (node.name, node.start, node.total, [shape(child) for child in node.children])


def timed(of: FlameSubject, step: int | None = None, rows: Any = ROWS, **changes: Any) -> FlameNode:
    profile = timed_profile(Context(trace(rows, length_ns=3000, **changes)), FlameChoice(of=of, step=step))
    tree = timed_tree(profile.calls, None if of in GPU_SUBJECTS else profile.start)
    return folded(tree, keys(tree))


def test_in_order_of_time_calls_are_where_they_ran_on_the_thread_that_trains() -> None:
    assert shape(timed(FlameSubject.OPS)) == (
        "all",
        0,
        2000,
        [
            (
                "thread 70",
                0,
                2000,
                [
                    ("ProfilerStep#4", 0, 1000, [("aten::linear", 100, 300, [("aten::mm", 150, 100, [])])]),
                    ("ProfilerStep#5", 1000, 1000, [("aten::linear", 1100, 500, [])]),
                ],
            )
        ],
    )


def test_a_step_in_order_of_time_fills_the_width() -> None:
    root = timed(FlameSubject.OPS, step=5, target=target(threads={70: "MainThread"}))
    assert shape(root)[2:] == (
        1000,
        [("thread 70 (MainThread)", 0, 1000, [("ProfilerStep#5", 0, 1000, [("aten::linear", 100, 500, [])])])],
    )


def test_gpu_work_in_order_of_time_is_in_the_order_of_its_launches() -> None:
    root = timed(FlameSubject.KERNELS)
    assert [(child.name, child.start, child.total) for child in root.children] == [
        ("thread 70", 0, 42),
        ("launch not in the trace", 42, 7),
    ]
    steps = root.children[0].children
    assert [(child.name, child.total) for child in steps] == [("ProfilerStep#4", 40), ("ProfilerStep#5", 2)]


def test_sampled_frames_in_order_of_time_that_mostly_slept_are_told_apart() -> None:
    profile = timed_profile(Context(trace({"python_function": SAMPLED})), FlameChoice(of=FlameSubject.PYTHON))
    tree = timed_tree(profile.calls, profile.start)
    (thread,) = folded(tree, keys(tree)).children
    (main,) = thread.children
    assert (main.name, main.kind, main.children[0].kind) == ("main", FlameKind.IDLE, FlameKind.FUNCTION)


def test_comparisons_look_at_whole_steps_only() -> None:
    profile = merged_profile(Context(trace(ROWS, length_ns=3000)), FlameChoice(), whole_steps_only=True)
    assert (profile.start - START_NS, profile.end - START_NS, profile.steps, profile.unit) == (0, 2000, 2, NS)
