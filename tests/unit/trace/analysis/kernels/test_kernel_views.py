"""Tables of kernels, and how much of them uses tensor cores."""

from typing import Any

import pytest
from kineto_trace.analysis.kernels.kernel_views import hlo_ops, kernels, kernels_by_op, tensor_core_use
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.view import Compat
from support.trace_files import traces
from support.trace_files.hta_events import Event, event, gpu, launch, op, rows

SHAPE = {"grid_x": 132, "grid_y": 1, "grid_z": 1, "block_x": 256, "block_y": 1, "block_z": 1, "registers": 32}
BIG = {**SHAPE, "grid_x": 264}
COLUMNS = ("pattern", "length", "count", "gpu_us", "cpu_us")


def launched(thread: int, start: int, number: int, external_id: int) -> dict[str, Any]:
    return {
        "name": "cudaLaunchKernel",
        "thread": thread,
        "start": start,
        "duration": 100,
        "correlation": number,
        "external_id": external_id,
    }


def some_kernels() -> Trace:
    return traces.trace(
        {
            "cpu_op": [
                {"name": "aten::linear", "start": 0, "duration": 10_000, "id": 1, "finished": 1},
                {"name": "aten::addmm", "start": 1_000, "duration": 5_000, "id": 2, "finished": 1},
                {"name": "aten::copy_", "start": 1_500, "duration": 1_000, "id": 3, "finished": 1},
                {"name": "aten::relu", "start": 20_000, "duration": 1_000, "id": 4, "finished": 1},
            ],
            "cuda_runtime": [
                launched(0, 2_000, 1, 3),
                launched(0, 3_000, 2, 2),
                launched(0, 20_100, 3, 4),
                launched(0, 30_000, 4, 0),
            ],
            "kernel": [
                {"name": "copy", "start": 4_000, "duration": 1_500, "correlation": 1, **SHAPE},
                {"name": "s1688gemm", "start": 6_000, "duration": 4_000, "correlation": 2, **SHAPE},
                {"name": "copy", "start": 30_000, "duration": 500, "correlation": 3, **BIG},
                {"name": "alone", "start": 40_000, "duration": 2_500, "correlation": 4},
            ],
        },
        devices=(traces.H100,),
    )


def test_kernels_by_name() -> None:
    rows = kernels(Context(some_kernels())).rows()
    assert [(row["name"], row["tensor_cores"], row["calls"], row["total_us"]) for row in rows] == [
        ("s1688gemm", True, 1, 4),
        ("alone", False, 1, 2.5),
        ("copy", False, 2, 2),
    ]
    copy = rows[2]
    assert (copy["mean_us"], copy["max_us"], copy["min_us"], copy["share_pct"]) == (1, 1.5, 0.5, 200 / 8.5)
    assert copy["blocks_per_sm"] == 1.25  # 1.5 µs of 1 and 0.5 µs of 2
    assert copy["occupancy_pct"] == pytest.approx((1.5 * 13 + 0.5 * 25) / 2)
    assert rows[1]["blocks_per_sm"] is None


def test_the_plugin_rounds_and_takes_what_is_unknown_for_zero() -> None:
    rows = kernels(Context(some_kernels()), compat=Compat.PLUGIN).rows()
    assert [(row["total_us"], row["mean_us"], row["max_us"], row["min_us"]) for row in rows] == [
        (4, 4, 4, 4),
        (2, 2, 2, 2),
        (2, 1, 2, 0),
    ]
    assert [row["blocks_per_sm"] for row in rows] == [1, 0, 1.25]


def test_kernels_by_operator_and_properties() -> None:
    rows = kernels_by_op(Context(some_kernels())).rows()
    assert [(row["name"], row["op"], row["grid"], row["op_eligible"]) for row in rows] == [
        ("s1688gemm", "aten::addmm", "[132, 1, 1]", True),
        ("alone", None, None, False),
        ("copy", "aten::copy_", "[132, 1, 1]", False),
        ("copy", "aten::relu", "[264, 1, 1]", False),
    ]
    assert (rows[0]["block"], rows[0]["registers"], rows[0]["shared_memory_bytes"]) == ("[256, 1, 1]", 32, 0)


def test_the_plugin_leaves_out_kernels_of_no_operator() -> None:
    rows = kernels_by_op(Context(some_kernels()), compat=Compat.PLUGIN).rows()
    assert [row["op"] for row in rows] == ["aten::addmm", "aten::copy_", "aten::relu"]


def test_the_plugin_hangs_kernels_without_a_call_under_the_root_of_threads_with_steps() -> None:
    step = {"name": "ProfilerStep#1", "start": 0, "duration": 50_000, "id": 9}
    kernel = {"name": "k", "start": 4_000, "duration": 1_000, "correlation": 77}
    trace = traces.trace({"user_annotation": [step], "kernel": [kernel]})
    assert kernels_by_op(Context(trace), compat=Compat.PLUGIN).values("op") == ["CallTreeRoot"]


def test_how_much_of_the_time_uses_tensor_cores_and_could() -> None:
    context = Context(some_kernels())
    # addmm is the deepest operator that can; the copy in it counts, too: 5.5 of 6 µs of operators
    assert tensor_core_use(context).values("used_pct") == pytest.approx([400 / 8.5, 550 / 6])
    # for the plug-in not: 4 of 6 µs
    assert tensor_core_use(context, compat=Compat.PLUGIN).values("used_pct") == pytest.approx([400 / 8.5, 400 / 6])


def test_without_kernels_there_is_a_note() -> None:
    context = Context(traces.trace({}))
    for found in (kernels(context), kernels_by_op(context), tensor_core_use(context)):
        assert found.notes == ("the trace has no kernels",)


def run(name: str, start: float, kernels: str, number: int, tid: int = 1) -> list[Event]:
    """An op of 50 us that launches kernels of 2 us each."""
    found = [op(name, start, 50, tid)]
    for place, kernel in enumerate(kernels):
        found.append(launch(number + place, start + 3 * place + 1, tid=tid))
        found.append(gpu(kernel, start + 10 * place + 60, 2, number + place))
    return found


@pytest.fixture
def events() -> list[Event]:
    # three times a, b, c under layer > aten::linear; once a, b; once c, b, a in a layer of its own
    found: list[Event] = []
    for place in range(3):
        found += [op("layer", 1000 * place, 100), *run("aten::linear", 1000 * place + 10, "abc", 10 * place + 1)]
    found += run("aten::linear", 5000, "ab", 51)
    return [*found, op("layer", 6000, 100), *run("aten::linear", 6010, "cba", 61)]


@pytest.mark.parametrize("hta", [False, True])
def test_sequences_are_counted_with_their_times(events: list[Event], hta: bool) -> None:
    assert rows(events, "frequent_sequences", *COLUMNS, hta=hta, op="layer") == [
        ("layer|a|b|c", 3, 3, 18, 300),
        ("layer|c|b|a", 3, 1, 6, 100),
    ]


def test_runs_at_any_depth_count_but_to_hta_only_the_least_deep(events: list[Event]) -> None:
    found = rows(events, "frequent_sequences", "pattern", "count", hta=False, op="linear", min_pattern_len=2)
    assert found == [("aten::linear|a|b|c", 3), ("aten::linear|a|b", 1), ("aten::linear|c|b|a", 1)]
    assert rows(events, "frequent_sequences", "pattern", op="linear", min_pattern_len=2) == [("aten::linear|a|b",)]


def test_only_the_most_frequent_are_given_but_to_hta_all(events: list[Event]) -> None:
    found = rows(events, "frequent_sequences", "pattern", hta=False, op="layer", top_k=1)
    assert found == [("layer|a|b|c",)]
    assert len(rows(events, "frequent_sequences", "pattern", op="layer", top_k=1)) == 2


def test_runs_inside_runs_do_not_count() -> None:
    events = [op("aten::outer", 0, 100), *run("aten::inner", 10, "abc", 1)]
    assert rows(events, "frequent_sequences", "pattern", "cpu_us", hta=False) == [("aten::outer|a|b|c", 100)]


def test_annotations_and_synchronisations_are_part_of_htas_sequences() -> None:
    sync = [launch(9, 40, name="cudaStreamSynchronize"), event("cuda_sync", "Stream Sync", 90, 2, 0, 7)]
    sync[1]["args"] = {"stream": 7, "correlation": 9}
    events = [event("user_annotation", "## forward ##", 0, 200), *run("aten::x", 10, "ab", 1), *sync]
    assert rows(events, "frequent_sequences", "pattern", op="forward") == [("## forward ##|a|b|Stream Sync",)]
    assert rows(events, "frequent_sequences", "pattern", hta=False, op="forward", min_pattern_len=2) == [
        ("## forward ##|a|b",)
    ]


def test_the_backward_threads_work_is_under_the_annotation_to_hta() -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 1000),
        event("user_annotation", "## backward ##", 100, 500),
        *run("autograd::engine::evaluate_function: X", 110, "abc", 1, tid=2),
    ]
    assert rows(events, "frequent_sequences", "pattern", op="backward") == [("## backward ##|a|b|c",)]
    assert rows(events, "frequent_sequences", "pattern", hta=False, op="## backward") == []


def test_an_op_that_is_not_there_is_told_of() -> None:
    from kineto_trace.catalog.view_catalog import find_view
    from support.trace_files.hta_events import context

    result = find_view("frequent_sequences")(context(run("aten::x", 0, "ab", 1)), op="nothing")
    assert result.notes == ("no event whose name contains 'nothing' launched 3 or more GPU activities",)


@pytest.mark.parametrize("hta", [False, True])
def test_events_that_end_before_they_start_do_no_harm(hta: bool) -> None:
    events = [*run("aten::x", 0.5, "abc", 1), launch(9, 20.3, 0.4, name="cudaGetDevice"), op("aten::y", 21.0, 0.1)]
    assert rows(events, "frequent_sequences", "pattern", hta=hta, op="aten::x") == [("aten::x|a|b|c",)]


FUSION = '"hlo_op":"fusion.2","hlo_module":"jit_f","op_name":"jit(f)/add","source":"a.py:7"'


def kernels_of_hlo() -> Trace:
    return traces.trace(
        {
            "kernel": [
                {"name": "fusion_2", "start": 0, "duration": 2_000, "hlo": FUSION},
                {"name": "fusion_2", "start": 5_000, "duration": 4_000, "hlo": FUSION},
                {"name": "gemm", "start": 10_000, "duration": 3_000, "hlo": '"hlo_module":"jit_f"'},
                {"name": "other", "start": 20_000, "duration": 1_000, "hlo": ""},
            ],
            "cpu_op": [
                {"name": "dot.1", "start": 0, "duration": 500, "id": 1, "inputs": '"hlo_op":"dot.1","hlo_module":"g"'},
                {"name": "aten::add", "start": 0, "duration": 500, "id": 2, "inputs": '"Input Dims":[[2]]'},
            ],
        }
    )


def test_operations_come_with_module_line_and_share() -> None:
    answer = hlo_ops(Context(kernels_of_hlo()))
    keys = ("hlo_op", "hlo_module", "op_name", "source", "where", "runs", "total_us", "mean_us", "max_us", "share_pct")
    assert [tuple(row[key] for key in keys) for row in answer.rows()] == [
        ("fusion.2", "jit_f", "jit(f)/add", "a.py:7", "GPU", 2, 6.0, 3.0, 4.0, 60.0),
        (None, "jit_f", None, None, "GPU", 1, 3.0, 3.0, 3.0, 30.0),
        ("dot.1", "g", None, None, "CPU", 1, 0.5, 0.5, 0.5, 100.0),
    ]
    assert list(answer.notes) == ["10.0 % of the kernels' time belongs to no known HLO operation"]


def test_a_trace_without_hlo_says_so() -> None:
    answer = hlo_ops(Context(traces.trace({"kernel": [{"name": "k", "start": 0, "duration": 1, "hlo": ""}]})))
    assert answer.rows() == []
    assert list(answer.notes) == ["the trace has no HLO operations: only JAX programs have them"]
