import json
from typing import Any

from kineto_trace.formats.flame_graphs import FlameGraph, folded, speedscope, stacks
from kineto_trace.model.context import Context
from kineto_trace.structure.call_forests import NO_LAUNCH
from support.trace_files.traces import target, trace

OP = {"thread": 70, "sequence": -1, "finished": 1, "inputs": -1}
ROWS: dict[str, list[dict[str, Any]]] = {
    "user_annotation": [{**OP, "start": 0, "duration": 1000, "name": "step", "id": 1}],
    "cpu_op": [
        {**OP, "start": 100, "duration": 300, "name": "aten::linear", "id": 2},
        {**OP, "start": 150, "duration": 100, "name": "aten::mm", "id": 3},
        {**OP, "start": 500, "duration": 300, "name": "aten::linear", "id": 4},
        {**OP, "start": 550, "duration": 100, "name": "aten::mm", "id": 5},
        {**OP, "start": 0, "duration": 50, "name": "aten::mm", "id": 6, "thread": 80},
    ],
    "cuda_runtime": [
        {"start": 160, "duration": 10, "name": "cudaLaunchKernel", "thread": 70, "correlation": 1},
        {"start": 560, "duration": 10, "name": "cudaLaunchKernel", "thread": 70, "correlation": 2},
    ],
    "kernel": [
        {"start": 300, "duration": 40, "name": "gemm", "stream": 7, "correlation": 1},
        {"start": 600, "duration": 2, "name": "gemm", "stream": 7, "correlation": 2},
        {"start": 900, "duration": 7, "name": "a;b", "stream": 7, "correlation": 9},
    ],
}
FRAME = {"thread": 70, "parent": -1}
SAMPLES: list[dict[str, Any]] = [
    {**FRAME, "start": 0, "duration": 50, "name": "main", "samples": 5, "self_samples": 1},
    {**FRAME, "start": 0, "duration": 20, "name": "f", "samples": 2, "self_samples": 2, "parent": 0, "depth": 1},
    {**FRAME, "start": 30, "duration": 20, "name": "f", "samples": 2, "self_samples": 2, "parent": 0, "depth": 1},
]


def lines(rows: dict[str, list[dict[str, Any]]], graph: FlameGraph, **changes: Any) -> set[str]:
    return set(folded(stacks(Context(trace(rows, **changes)), graph)).decode().splitlines())


def test_host_time_is_what_each_frame_ran_itself_summed_over_equal_stacks() -> None:
    assert lines(ROWS, FlameGraph.HOST, target=target(threads={70: "MainThread"})) == {
        "thread 70 (MainThread);step 400",  # 1000 - 300 - 300
        "thread 70 (MainThread);step;aten::linear 400",  # twice 300 - 100
        "thread 70 (MainThread);step;aten::linear;aten::mm 200",
        "thread 80;aten::mm 50",
    }


def test_gpu_time_stands_below_the_stack_that_launched_it() -> None:
    assert lines(ROWS, FlameGraph.GPU) == {
        "thread 70;step;aten::linear;aten::mm;gemm 42",
        f"{NO_LAUNCH};a:b 7",  # a semicolon would part it
    }


def test_samples_count_where_a_frame_ran_itself() -> None:
    assert lines({"python_function": SAMPLES}, FlameGraph.SAMPLES) == {"thread 70;main 1", "thread 70;main;f 4"}


def test_a_trace_without_anything_of_the_kind_has_no_stacks() -> None:
    for graph in FlameGraph:
        assert folded(stacks(Context(trace({})), graph)) == b""


def test_a_stack_deeper_than_pythons_recursion_limit_is_no_problem() -> None:
    depth = 3_000
    deep = [
        {
            **FRAME,
            "start": row,
            "duration": 2 * (depth - row),
            "name": "f",
            "parent": row - 1,
            "depth": row,
            "samples": 1,
        }
        | {"self_samples": int(row == depth - 1)}
        for row in range(depth)
    ]
    [line] = lines({"python_function": deep}, FlameGraph.SAMPLES)
    assert line == "thread 70;" + ";".join(["f"] * depth) + " 1"


def test_speedscope_has_a_profile_for_each_graph_with_weight() -> None:
    context = Context(trace(ROWS))
    value = json.loads(speedscope({graph: stacks(context, graph) for graph in FlameGraph}, "t.json"))
    assert value["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    names = [frame["name"] for frame in value["shared"]["frames"]]
    shown = [
        (
            profile["name"],
            profile["unit"],
            profile["endValue"],
            [[names[n] for n in path] for path in profile["samples"]],
        )
        for profile in value["profiles"]
    ]
    assert shown[0] == (
        "GPU time by launching stack",
        "nanoseconds",
        49,
        [[NO_LAUNCH, "a;b"], ["thread 70", "step", "aten::linear", "aten::mm", "gemm"]],
    )
    assert shown[1][:3] == ("host time", "nanoseconds", 1050)
    assert [sum(profile["weights"]) for profile in value["profiles"]] == [49, 1050]
