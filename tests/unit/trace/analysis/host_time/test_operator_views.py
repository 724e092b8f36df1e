""""""

from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.host_time.operator_views import call_tree, modules, op_times, operators
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table, Trace
from kineto_trace.view_api.view import Compat
from support.trace_files.traces import trace

Rows = dict[str, list[dict[str, Any]]]
NO_INPUTS, MM_INPUTS = -1, '"Input Dims": [[2, 3], [3, 4]], "Call stack": "a.py(1): f;b.py(2): g"'
Row = dict[str, Any]


def op(start: int, duration: int, name: str, number: int, thread: int = 1) -> dict[str, Any]:
    return {"start": start, "duration": duration, "name": name, "thread": thread, "id": number, "finished": 1}


def call(start: int, duration: int, correlation: int, external: int = 0, thread: int = 1) -> dict[str, Any]:
    row = {"start": start, "duration": duration, "name": "cudaLaunchKernel", "thread": thread}
    return {**row, "correlation": correlation, "external_id": external}


def gpu(start: int, duration: int, correlation: int, name: str = "kernel") -> dict[str, Any]:
    return {"start": start, "duration": duration, "name": name, "correlation": correlation}


# linear 0…10 µs > addmm 1…9 µs; addmm calls the runtime twice (0.5 and 1 µs), the second call calls the driver.
LINEAR: Rows = {
    "cpu_op": [op(0, 10_000, "aten::linear", 1), op(1_000, 8_000, "aten::addmm", 2), op(20_000, 1_000, "aten::t", 3)],
    "cuda_runtime": [call(2_000, 500, 11, 2), call(3_000, 1_000, 12, 2)],
    "cuda_driver": [call(3_200, 300, 13, 2)],
    "kernel": [gpu(5_000, 4_000, 11, "sm90_xmma_gemm_s16816_x"), gpu(9_000, 2_000, 13)],
    "gpu_memcpy": [gpu(12_000, 1_000, 12)],
}


def with_inputs(rows: Rows, texts: list[str | None]) -> Trace:
    """The trace with these arguments of its operators."""
    made = trace(rows)
    strings = [*made.strings, *(text for text in texts if text is not None)]
    ops = made.tables["cpu_op"]
    numbers = [NO_INPUTS if text is None else strings.index(text) for text in texts]
    columns = {**ops.columns, "inputs": np.array(numbers, np.int32)}
    return Trace(
        target=made.target,
        strings=tuple(strings),
        tables={**made.tables, "cpu_op": Table("cpu_op", columns)},
        window_start_ns=made.window_start_ns,
        window_end_ns=made.window_end_ns,
    )


def by_name(made: Trace, **options: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in operators(Context(made), **options).rows()}


def test_the_shares_of_all_operators_are_those_of_the_sums_of_their_own_times() -> None:
    for compat in (Compat.NONE, Compat.PLUGIN):
        rows = operators(Context(trace(LINEAR)), compat=compat).rows()
        for part in ("device", "host"):
            whole = sum(row[f"{part}_self_us"] for row in rows)
            assert [row[f"{part}_self_pct"] for row in rows] == [100 * row[f"{part}_self_us"] / whole for row in rows]
            assert sum(row[f"{part}_self_pct"] for row in rows) == pytest.approx(100)


def test_shares_of_gpu_time_are_unknown_without_gpu_activity() -> None:
    rows = operators(Context(trace({"cpu_op": LINEAR["cpu_op"]}))).rows()
    assert {row["device_self_pct"] for row in rows} == {None}
    assert sum(row["host_self_pct"] for row in rows) == pytest.approx(100)


def test_cumulative_shares_follow_the_order_of_the_rows() -> None:
    for tables, share in ((LINEAR, "device_self_pct"), ({"cpu_op": LINEAR["cpu_op"]}, "host_self_pct")):
        rows = operators(Context(trace(tables))).rows()
        shares = [row[share] for row in rows]
        assert [row["cumulative_pct"] for row in rows] == pytest.approx(
            [sum(shares[: n + 1]) for n in range(len(rows))]
        )
        assert rows[-1]["cumulative_pct"] == pytest.approx(100)
    assert {row["cumulative_pct"] for row in operators(Context(trace(LINEAR)), compat=Compat.PLUGIN).rows()} == {None}


def test_operators_of_one_kind_of_work_are_one_row_whose_total_counts_nested_ones_once() -> None:
    kinds, names = by_name(trace(LINEAR), group_by="type"), by_name(trace(LINEAR))
    assert {name: row["calls"] for name, row in kinds.items()} == {"matrix product": 2, "view": 1}
    product = kinds["matrix product"]
    assert product["host_total_us"] == names["aten::linear"]["host_total_us"]
    assert product["host_self_us"] == names["aten::linear"]["host_self_us"] + names["aten::addmm"]["host_self_us"]
    with pytest.raises(ViewError, match=r"group_by='type' is not valid; use one of name, name\+shape$"):
        operators(Context(trace(LINEAR)), compat=Compat.PLUGIN, group_by="type")


def test_an_operator_has_the_gpu_work_of_its_calls_and_in_total_that_of_operators_inside() -> None:
    found = by_name(with_inputs(LINEAR, [None] * 3))
    assert (found["aten::addmm"]["device_self_us"], found["aten::addmm"]["device_total_us"]) == (7.0, 7.0)
    assert (found["aten::linear"]["device_self_us"], found["aten::linear"]["device_total_us"]) == (0.0, 7.0)


def test_host_time_is_told_with_and_without_the_operators_inside_and_the_own_calls() -> None:
    found = by_name(with_inputs(LINEAR, [None] * 3))
    addmm, linear = found["aten::addmm"], found["aten::linear"]
    assert (linear["host_total_us"], linear["host_exclusive_us"], linear["host_self_us"]) == (10.0, 2.0, 2.0)
    # The driver call is inside a runtime call: its time is not taken off twice.
    assert (addmm["host_total_us"], addmm["host_exclusive_us"], addmm["host_self_us"]) == (8.0, 8.0, 6.5)


def test_tensor_cores_are_a_share_of_the_device_time() -> None:
    found = by_name(with_inputs(LINEAR, [None] * 3))
    assert found["aten::addmm"]["tensor_core_self_pct"] == pytest.approx(100 * 4 / 7)
    assert found["aten::linear"]["tensor_core_self_pct"] == 0
    assert found["aten::linear"]["tensor_core_total_pct"] == pytest.approx(100 * 4 / 7)
    assert [found[name]["tensor_core_eligible"] for name in ("aten::linear", "aten::t")] == [True, False]


def test_calls_with_other_shapes_are_other_rows_if_wanted() -> None:
    rows: Rows = {"cpu_op": [op(10 * n, 5, "aten::mm", n + 1) for n in range(3)]}
    made = with_inputs(rows, [MM_INPUTS, None, MM_INPUTS])
    assert by_name(made)["aten::mm"]["calls"] == 3
    found = operators(Context(made), group_by="name+shape").rows()
    assert [(row["input_shape"], row["calls"]) for row in found] == [("[[2, 3], [3, 4]]", 2), (None, 1)]


def test_calls_with_other_stacks_are_other_rows_if_wanted() -> None:
    rows: Rows = {"cpu_op": [op(10 * n, 5 + n, "aten::mm", n + 1) for n in range(3)]}
    found = operators(Context(with_inputs(rows, [MM_INPUTS, None, MM_INPUTS])), stacks=True).rows()
    assert [(row["call_stack"], row["calls"]) for row in found] == [("a.py(1): f;b.py(2): g", 2), (None, 1)]


def test_without_recorded_stacks_they_are_made_of_python_functions() -> None:
    def frame(start: int, duration: int, name: str, thread: int = 1) -> dict[str, Any]:
        return {"start": start, "duration": duration, "name": name, "thread": thread, "parent": -1, "module": -1}

    frames = [frame(0, 100, "main"), frame(10, 20, "f"), frame(40, 20, "f"), frame(42, 10, "g"), frame(0, 100, "x", 2)]
    ops = [op(12, 5, "aten::mm", 1), op(45, 5, "aten::mm", 2), op(55, 1, "aten::mm", 3), op(200, 1, "aten::mm", 4)]
    found = operators(Context(trace({"python_function": frames, "cpu_op": ops})), stacks=True).rows()
    assert {row["call_stack"]: row["calls"] for row in found} == {"f;main": 2, "g;f;main": 1, None: 1}


def test_what_was_not_recorded_is_told() -> None:
    found = operators(Context(trace({"cpu_op": [op(0, 5, "aten::mm", 1)]})), group_by="name+shape", stacks=True)
    assert ["record_shapes" in note or "with_stack" in note for note in found.notes] == [True, True, False]
    assert found.notes[-1] == "the trace has no GPU activity"


def test_figures_of_the_gpu_are_missing_where_no_gpu_activity_was_recorded() -> None:
    context = Context(trace({"cpu_op": [op(0, 5, "aten::mm", 1)]}))
    (row,) = operators(context).rows()
    missing = {name for name, value in row.items() if value is None}
    assert missing == {"input_shape", "call_stack", "device_self_us", "device_total_us", "device_self_pct"} | {
        f"tensor_core_{part}_pct" for part in ("self", "total")
    }


def test_an_unknown_grouping_is_refused() -> None:
    with pytest.raises(ViewError, match="name\\+shape"):
        operators(Context(trace({})), group_by="shape")


def test_a_trace_without_operators_has_no_rows() -> None:
    for compat in (Compat.NONE, Compat.PLUGIN):
        assert len(operators(Context(trace({})), compat=compat, group_by="name+shape", stacks=True)) == 0


def test_the_plug_in_goes_by_external_ids_and_does_not_see_the_driver() -> None:
    found = by_name(with_inputs(LINEAR, [None] * 3), compat=Compat.PLUGIN)
    assert (found["aten::addmm"]["device_self_us"], found["aten::linear"]["device_total_us"]) == (5.0, 5.0)
    assert found["aten::addmm"]["host_self_us"] == pytest.approx(6.5, abs=1e-3)
    assert found["aten::addmm"]["tensor_core_self_pct"] == pytest.approx(80)


def test_the_plug_in_lets_an_operator_take_the_place_of_its_only_namesake() -> None:
    rows: Rows = {
        "cpu_op": [op(0, 100, "aten::sum", 1), op(10, 50, "aten::sum", 2), op(20, 10, "aten::fill_", 3)],
        "cuda_runtime": [call(5, 2, 1, 1), call(40, 4, 2, 2)],
        "kernel": [gpu(200, 7_000, 1), gpu(300, 3_000, 2)],
    }
    found = by_name(trace(rows), compat=Compat.PLUGIN)["aten::sum"]
    # The inner one's call remains, the outer one's is lost: 100 - 10 of the child - 4 of the call.
    assert (found["calls"], found["device_self_us"], found["host_self_us"]) == (1, 3.0, pytest.approx(0.086, abs=1e-3))
    assert by_name(trace(rows))["aten::sum"]["calls"] == 2


def test_the_plug_in_gives_calls_without_external_id_to_the_first_node_without_one() -> None:
    module = {"start": 0, "duration": 100, "name": "nn.Module: A_0", "thread": 1, "module": 0, "parent": -1}
    rows: Rows = {"cpu_op": [op(10, 50, "aten::mm", 1)], "python_function": [module]}
    rows |= {"cuda_runtime": [call(20, 2, 1)], "kernel": [gpu(200, 7_000, 1)]}
    assert by_name(trace(rows), compat=Compat.PLUGIN)["aten::mm"]["device_total_us"] == 0
    assert by_name(trace(rows))["aten::mm"]["device_total_us"] == 7


def test_the_plug_in_drops_an_operator_that_overlaps_another_one_in_part() -> None:
    ops = [op(0, 100, "a", 1), op(50, 100, "b", 2), op(60, 10, "c", 3), op(120, 10, "d", 4)]
    assert sorted(by_name(trace({"cpu_op": ops}), compat=Compat.PLUGIN)) == ["a", "c", "d"]
    assert sorted(by_name(trace({"cpu_op": ops}))) == ["a", "b", "c", "d"]


def test_the_plug_in_counts_no_data_loading_optimizer_or_parallel_forward() -> None:
    names = ["Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad", "DistributedDataParallel.forward"]
    names += ["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "ProfilerStep#3", "aten::mm"]
    ops = [op(100 * place, 10, name, place + 1) for place, name in enumerate(names)]
    assert list(by_name(trace({"cpu_op": ops}), compat=Compat.PLUGIN)) == ["aten::mm"]


def test_with_the_plug_in_eligibility_passes_through_operators_only() -> None:
    ops = [op(0, 100, "outer", 1), op(10, 50, "nn", 2), op(20, 10, "aten::mm", 3), op(200, 50, "around", 4)]
    ops.append(op(210, 10, "aten::mm", 5))
    module = {"start": 205, "duration": 30, "name": "nn.Module: Linear_0", "thread": 1, "module": 0, "parent": -1}
    found = by_name(trace({"cpu_op": ops, "python_function": [module]}), compat=Compat.PLUGIN)
    assert [found[name]["tensor_core_eligible"] for name in ("outer", "nn", "around")] == [True, True, False]


def test_times_of_a_random_forest_are_those_of_a_plain_walk() -> None:
    random = np.random.default_rng(3)
    ops: list[dict[str, Any]] = []

    def grow(start: int, end: int, depth: int) -> None:
        at = start
        while end - at > 20 and len(ops) < 300:
            length = int(random.integers(5, end - at))
            ops.append(op(at, length, "op", len(ops) + 1))
            if depth < 5:
                grow(at + 1, at + length - 1, depth + 1)
            at += length + int(random.integers(0, 30))

    grow(0, 5000, 0)
    calls = [call(int(t), 1, n + 1) for n, t in enumerate(random.integers(0, 5000, 80))]
    kernels = [gpu(6000, int(random.integers(1, 50)), n + 1) for n in range(80)]
    made = trace({"cpu_op": ops, "cuda_runtime": calls, "kernel": kernels})
    times = op_times(Context(made))
    for row, each in enumerate(ops):
        inside = [c for c in calls if each["start"] <= c["start"] < each["start"] + each["duration"]]
        total = sum(kernels[c["correlation"] - 1]["duration"] for c in inside)
        assert times.device_total[row] == total


def test_the_plug_in_hangs_backward_operators_below_modules_or_loses_them() -> None:
    evaluate, accumulate = (
        f"autograd::engine::evaluate_function: {n}" for n in ("Mm", "torch::autograd::AccumulateGrad")
    )
    linked = {"sequence": 5, "torch_thread": 1, "inputs": -1}
    ops = [{**op(10, 50, "aten::mm", 1), **linked, "scope": 0}]
    ops += [op(200, 40, evaluate, 2), {**op(210, 20, "MmBackward0", 3), **linked, "scope": 1, "forward_thread": 1}]
    ops += [op(250, 5, accumulate, 4), op(300, 40, evaluate.replace("Mm", "Lost"), 5), op(310, 5, "aten::lost", 6)]
    ops = [{"sequence": -1, "inputs": -1, **row} for row in ops]
    module = {"start": 0, "duration": 100, "name": "nn.Module: A_0", "thread": 1, "module": 0, "parent": -1}
    with_module = by_name(trace({"cpu_op": ops, "python_function": [module]}), compat=Compat.PLUGIN)
    assert sorted(with_module) == sorted(["aten::mm", evaluate, "MmBackward0", accumulate])
    assert len(by_name(trace({"cpu_op": ops}), compat=Compat.PLUGIN)) == 6  # without modules nothing moves


def test_an_operator_inside_one_of_its_name_counts_once_in_the_totals() -> None:
    rows: Rows = {
        "cpu_op": [op(0, 10_000, "aten::sum", 1), op(1_000, 8_000, "aten::b", 2), op(2_000, 6_000, "aten::sum", 3)],
        "cuda_runtime": [call(3_000, 500, 11, 3)],
        "kernel": [gpu(5_000, 4_000, 11)],
    }
    found = by_name(trace(rows))["aten::sum"]
    assert (found["calls"], found["host_total_us"], found["host_exclusive_us"]) == (2, 10, 8)
    assert (found["device_total_us"], found["device_self_us"]) == (4, 4)
    assert by_name(trace(rows))["aten::b"]["device_total_us"] == 4


def test_shapes_are_rows_of_their_own_also_inside_one_of_the_same_name() -> None:
    rows: Rows = {"cpu_op": [op(0, 10_000, "aten::sum", 1), op(2_000, 6_000, "aten::sum", 2)]}
    shaped = with_inputs(rows, ['"Input Dims": [[2, 3]]', '"Input Dims": [[3]]'])
    found = operators(Context(shaped), group_by="name+shape").values("host_total_us")
    assert sorted(found) == [6, 10]


def host_op(start: int, duration: int, name: str, number: int, **more: Any) -> Row:
    row = {"start": start, "duration": duration, "name": name, "thread": 1, "id": number, "finished": 1}
    return {**row, "sequence": -1, "inputs": -1, **more}


def module(start: int, duration: int, name: str, number: int, parent: int = -1) -> Row:
    row = {"start": start, "duration": duration, "name": f"nn.Module: {name}", "thread": 1}
    return {**row, "module": number, "parent": parent}


def launch(start: int, correlation: int, external: int) -> Row:
    row = {"start": start, "duration": 2, "name": "cudaLaunchKernel", "thread": 1}
    return {**row, "correlation": correlation, "external_id": external}


# Net 0…1000 > Linear 100…400 and 500…700, each with aten::linear > aten::addmm; Net runs aten::relu itself.
MODEL: dict[str, list[Row]] = {
    "python_function": [
        module(0, 1000, "Net_0", 0),
        module(100, 300, "Linear_0", 0, 0),
        module(500, 200, "Linear_1", 1, 0),
    ],
    "cpu_op": [
        host_op(150, 200, "aten::linear", 1),
        host_op(160, 100, "aten::addmm", 2, sequence=5, torch_thread=1),
        host_op(520, 100, "aten::linear", 3),
        host_op(800, 50, "aten::relu", 4),
        host_op(2000, 300, "autograd::engine::evaluate_function: AddmmBackward0", 5),
        host_op(2010, 200, "AddmmBackward0", 6, sequence=5, forward_thread=1, scope=1, torch_thread=1),
        host_op(2400, 40, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 7),
    ],
    "cuda_runtime": [launch(170, 1, 2), launch(530, 2, 3), launch(810, 3, 4), launch(2020, 4, 6)],
    "kernel": [
        {"start": 3000 + 1000 * n, "duration": duration, "name": "k", "correlation": n + 1}
        for n, duration in enumerate((100, 20, 3, 500))
    ],
}


def found(rows: dict[str, list[Row]], **options: Any) -> dict[str, Row]:
    return {row["path"]: row for row in modules(Context(trace(rows)), **options).rows()}


def test_modules_are_rows_by_path_outer_ones_first() -> None:
    rows = found(MODEL)
    assert list(rows) == ["Net_0", "Net_0/Linear_0", "Net_0/Linear_1"]
    assert [(row["depth"], row["occurrences"], row["operators"]) for row in rows.values()] == [
        (0, 1, 1),
        (1, 1, 1),
        (1, 1, 1),
    ]
    assert rows["Net_0/Linear_1"]["module_id"] == 1


def test_a_module_has_the_gpu_time_that_was_launched_in_its_calls() -> None:
    rows = found(MODEL)
    assert [row["device_total_us"] for row in rows.values()] == [0.123, 0.1, 0.02]
    assert [row["device_self_us"] for row in rows.values()] == [0.003, 0.1, 0.02]


def test_host_time_is_split_into_modules_operators_and_the_rest() -> None:
    net, linear = list(found(MODEL).values())[:2]
    assert (net["host_total_us"], net["host_self_us"], net["host_overhead_us"]) == (1.0, 0.5, 0.45)
    assert (linear["host_total_us"], linear["host_self_us"], linear["host_overhead_us"]) == (0.3, 0.3, 0.1)


def test_the_backward_pass_belongs_to_the_module_of_its_forward_operators() -> None:
    rows = found(MODEL)
    # AddmmBackward0's evaluation, and what accumulates its gradient.
    assert [row["backward_host_us"] for row in rows.values()] == [0.34, 0.34, 0.0]
    assert [row["backward_device_us"] for row in rows.values()] == [0.5, 0.5, 0.0]


def test_calls_from_two_places_are_two_rows_and_calls_from_one_place_are_one() -> None:
    rows = [module(0, 100, "A", 0), module(10, 10, "C", 2, 0), module(30, 10, "C", 2, 0)]
    rows += [module(200, 100, "B", 1), module(210, 10, "C", 2, 3)]
    assert {path: row["occurrences"] for path, row in found({"python_function": rows}).items()} == {
        "A": 1,
        "A/C": 2,
        "B": 1,
        "B/C": 1,
    }


def test_lightning_names_its_modules_in_operators() -> None:
    ops = [host_op(0, 100, "[pl][module]torch.nn.Linear: net", 1), host_op(10, 20, "aten::linear", 2)]
    rows = found({"cpu_op": ops, "cuda_runtime": [launch(12, 1, 2)], "kernel": MODEL["kernel"][:1]})
    assert list(rows) == ["torch.nn.Linear: net"]
    row = rows["torch.nn.Linear: net"]
    assert (row["operators"], row["device_total_us"], row["host_overhead_us"]) == (1, 0.1, 0.08)


def test_a_trace_without_modules_says_how_to_get_them() -> None:
    answer = modules(Context(trace({"cpu_op": MODEL["cpu_op"]})))
    assert (len(answer), "with_modules" in answer.notes[0]) == (0, True)


def test_the_plug_in_counts_all_calls_of_a_module_and_merges_equal_trees() -> None:
    python = [module(0, 100, "Net_0", 0), module(10, 30, "Linear_0", 0, 0)]
    python += [module(200, 100, "Net_0", 0), module(210, 50, "Linear_0", 0, 2)]
    ops = [host_op(12, 20, "aten::linear", 1), host_op(212, 20, "aten::linear", 2)]
    calls, kernels = [launch(14, 1, 1), launch(214, 2, 2)], MODEL["kernel"][:2]
    rows = found(
        {"python_function": python, "cpu_op": ops, "cuda_runtime": calls, "kernel": kernels}, compat=Compat.PLUGIN
    )
    assert list(rows) == ["Net_0", "Net_0/Linear_0"]
    net, linear = rows.values()
    assert (linear["occurrences"], linear["operators"]) == (2, 2)
    assert [linear[name] for name in ("host_total_us", "host_self_us")] == pytest.approx([0.08, 0.04], abs=2e-3)
    assert [linear[name] for name in ("device_total_us", "device_self_us")] == pytest.approx([0.12, 0.12], abs=2e-3)
    assert [net[name] for name in ("device_total_us", "device_self_us")] == pytest.approx([0.12, 0], abs=2e-3)


def test_equal_paths_of_the_call_tree_are_one_row() -> None:
    steps = [host_op(0, 500, "ProfilerStep#1", 10), host_op(500, 500, "ProfilerStep#2", 11)]
    ops = [host_op(10, 100, "aten::linear", 1), host_op(20, 50, "aten::addmm", 2), host_op(510, 100, "aten::linear", 3)]
    ops += [host_op(620, 10, "aten::addmm", 4)]
    calls, kernels = [launch(25, 1, 2), launch(625, 2, 4)], MODEL["kernel"][:2]
    tables = {"user_annotation": steps, "cpu_op": ops, "cuda_runtime": calls, "kernel": kernels}
    rows = call_tree(Context(trace(tables))).rows()
    assert [(row["path"], row["calls"], row["device_total_us"], row["host_self_us"]) for row in rows] == [
        (["ProfilerStep"], 2, 0.12, 0.79),
        (["ProfilerStep", "aten::linear"], 2, 0.1, 0.15),
        (["ProfilerStep", "aten::linear", "aten::addmm"], 1, 0.1, 0.05),
        (["ProfilerStep", "aten::addmm"], 1, 0.02, 0.01),
    ]
    assert [row["depth"] for row in call_tree(Context(trace(tables)), max_depth=1).rows()] == [0]


def test_python_functions_are_part_of_the_call_tree_if_wanted() -> None:
    tables = {"python_function": MODEL["python_function"], "cpu_op": MODEL["cpu_op"][:1]}
    kinds = [row["kind"] for row in call_tree(Context(trace(tables)), python=True).rows()]
    assert kinds.count("python_function") == 3
    assert [row["kind"] for row in call_tree(Context(trace(tables))).rows()] == ["cpu_op"]


def test_an_empty_trace_has_an_empty_call_tree() -> None:
    assert len(call_tree(Context(trace({})))) == 0


def test_an_operator_that_outlives_its_module_takes_no_more_of_it_than_there_is() -> None:
    rows = {"python_function": [module(0, 1000, "L_0", 0)], "cpu_op": [host_op(400, 2000, "a", 1)]}
    assert found(rows)["L_0"]["host_overhead_us"] == 0.4
    crossing = {
        "python_function": [module(0, 1000, "L_0", 0), module(500, 400, "L_1", 1, 0)],
        "cpu_op": [host_op(100, 700, "a", 1)],
    }
    assert found(crossing)["L_0"]["host_overhead_us"] == 0
