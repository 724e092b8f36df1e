from typing import Any

import pytest
from kineto_trace.analysis.host_time.module_views import call_tree, modules
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Compat
from support.trace_files.traces import trace

Row = dict[str, Any]


def op(start: int, duration: int, name: str, number: int, **more: Any) -> Row:
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
        op(150, 200, "aten::linear", 1),
        op(160, 100, "aten::addmm", 2, sequence=5, torch_thread=1),
        op(520, 100, "aten::linear", 3),
        op(800, 50, "aten::relu", 4),
        op(2000, 300, "autograd::engine::evaluate_function: AddmmBackward0", 5),
        op(2010, 200, "AddmmBackward0", 6, sequence=5, forward_thread=1, scope=1, torch_thread=1),
        op(2400, 40, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 7),
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
    ops = [op(0, 100, "[pl][module]torch.nn.Linear: net", 1), op(10, 20, "aten::linear", 2)]
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
    ops = [op(12, 20, "aten::linear", 1), op(212, 20, "aten::linear", 2)]
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
    steps = [op(0, 500, "ProfilerStep#1", 10), op(500, 500, "ProfilerStep#2", 11)]
    ops = [op(10, 100, "aten::linear", 1), op(20, 50, "aten::addmm", 2), op(510, 100, "aten::linear", 3)]
    ops += [op(620, 10, "aten::addmm", 4)]
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
    rows = {"python_function": [module(0, 1000, "L_0", 0)], "cpu_op": [op(400, 2000, "a", 1)]}
    assert found(rows)["L_0"]["host_overhead_us"] == 0.4
    crossing = {
        "python_function": [module(0, 1000, "L_0", 0), module(500, 400, "L_1", 1, 0)],
        "cpu_op": [op(100, 700, "a", 1)],
    }
    assert found(crossing)["L_0"]["host_overhead_us"] == 0
