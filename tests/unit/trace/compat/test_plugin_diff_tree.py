import pickle
from typing import Any

import pytest
from kineto_trace.analysis.diff.diff_views import compare, compare_jobs
from kineto_trace.compat.plugin_diff_tree import diff_tree, diff_tree_operators
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Compat
from support.trace_files.traces import trace

Row = dict[str, Any]


def op(start: int, duration: int, name: str, number: int) -> Row:
    row = {"start": 1000 * start, "duration": 1000 * duration, "name": name, "thread": 1, "id": number, "finished": 1}
    return {**row, "inputs": -1, "sequence": -1}


def module(start: int, duration: int, name: str) -> Row:
    row = {"start": 1000 * start, "duration": 1000 * duration, "name": f"nn.Module: {name}", "thread": 1}
    return {**row, "module": 0, "parent": -1}


def side(*rows: Row, launches: dict[int, int] | None = None) -> Context:
    """launches: time (us) of a call -> ns on the GPU."""
    tables: dict[str, list[Row]] = {"cpu_op": [], "python_function": []}
    for row in rows:
        tables["python_function" if "module" in row else "cpu_op"].append(row)
    wanted = list((launches or {}).items())
    tables["cuda_runtime"] = [
        {"start": 1000 * at, "duration": 1, "thread": 1, "correlation": n + 1, "external_id": 77}
        for n, (at, _) in enumerate(wanted)
    ]
    tables["kernel"] = [
        {"start": 900_000 + n, "duration": length, "name": "k", "correlation": n + 1}
        for n, (_, length) in enumerate(wanted)
    ]
    return Context(trace({kind: entries for kind, entries in tables.items() if entries}))


BASE = side(
    op(0, 500, "ProfilerStep#1", 1),
    op(10, 5, "aten::a", 2),
    module(20, 100, "Net_0"),
    module(30, 20, "Linear_0"),
    op(35, 10, "aten::linear", 3),
    op(60, 10, "aten::relu", 4),
    op(200, 40, "Optimizer.step#SGD.step", 5),
    launches={37: 30_000},
)
OTHER = side(
    op(0, 400, "ProfilerStep#7", 1),
    module(20, 80, "Net_0"),
    op(25, 10, "aten::linear", 2),
    module(50, 20, "Dropout_0"),
    op(150, 10, "aten::b", 3),
    op(170, 20, "aten::c", 4),
    op(200, 60, "Optimizer.step#SGD.step", 5),
)


def shown(path: str = "0") -> list[tuple[str, str, str, int]]:
    rows = compare(diff_tree, BASE, OTHER, path=path).rows()
    return [(row["path"], row["name_baseline"], row["name_other"], row["children"]) for row in rows]


def test_nodes_are_matched_by_kind_and_name_and_the_rest_is_put_together() -> None:
    assert shown() == [
        ("0", "CompositeNodes", "CompositeNodes", 4),
        ("0-0", "aten::a", "Blank", 0),
        ("0-1", "nn.Module: Net_0", "nn.Module: Net_0", 0),
        ("0-2", "Blank", "CompositeNodes", 0),
        ("0-3", "Optimizer.step#SGD.step", "Optimizer.step#SGD.step", 0),
    ]


def test_times_are_those_of_the_gpu_or_else_of_the_host_and_add_up() -> None:
    whole, first, net, between, optimizer = compare(diff_tree, BASE, OTHER).rows()
    assert [net[f"total_{name}"] for name in ("baseline_us", "other_us", "delta_us", "delta_pct")] == pytest.approx(
        [30, 80, 50, 100 * 50 / 30], abs=1e-3
    )
    assert (net["host_baseline_us"], net["device_other_us"]) == (pytest.approx(100, abs=1e-3), 0)
    assert (first["total_baseline_us"], between["total_other_us"]) == (pytest.approx(5), pytest.approx(30))
    assert whole["total_baseline_us"] == pytest.approx(5 + 30 + 40, abs=2e-3)
    assert optimizer["accumulated_baseline_us"] == pytest.approx(75, abs=2e-3)
    assert optimizer["accumulated_delta_us"] == pytest.approx(80 + 30 + 60 - 75, abs=2e-3)
    assert whole["accumulated_baseline_us"] is None


def test_a_path_leads_into_a_node() -> None:
    inner = side(module(0, 100, "A"), module(10, 10, "B"), module(30, 10, "C"), module(50, 10, "B"))
    outer = side(module(0, 100, "A"), module(10, 30, "B"), module(50, 20, "B"))
    # One module alone is no composite: its children are matched at once, the first B with the first B.
    found = compare(diff_tree, inner, outer).rows()
    assert [(row["path"], row["name_baseline"], row["name_other"]) for row in found] == [
        ("0", "nn.Module: A", "nn.Module: A"),
        ("0-0", "nn.Module: B", "nn.Module: B"),
        ("0-1", "nn.Module: C", "Blank"),
        ("0-2", "nn.Module: B", "nn.Module: B"),
    ]
    assert compare(diff_tree, inner, outer, path="0-2").values("host_delta_us") == pytest.approx([10], abs=1e-3)


def test_operators_inside_a_node_are_compared_by_name() -> None:
    rows = {row["name"]: row for row in compare(diff_tree_operators, BASE, OTHER, path="0-1").rows()}
    assert sorted(rows) == ["aten::linear", "aten::relu"]
    linear = rows["aten::linear"]
    assert (linear["calls_baseline"], linear["calls_other"], linear["change"]) == (1, 1, "unchanged")
    assert (linear["device_self_baseline_us"], linear["device_self_other_us"]) == (30, 0)
    assert rows["aten::relu"]["change"] == "deleted"


def test_with_the_plug_ins_figures_external_ids_decide() -> None:
    rows = compare(diff_tree, BASE, OTHER, compat=Compat.PLUGIN).rows()
    assert rows[0]["device_baseline_us"] == 0  # no operator has the calls' 77


def test_rows_have_their_depth_and_the_name_of_the_side_that_has_one() -> None:
    rows = compare(diff_tree, BASE, OTHER).rows()
    assert [(row["depth"], row["name"]) for row in rows] == [
        (0, "CompositeNodes"),
        (1, "aten::a"),
        (1, "nn.Module: Net_0"),
        (1, "CompositeNodes"),
        (1, "Optimizer.step#SGD.step"),
    ]


def test_the_tree_of_a_trace_can_come_from_another_process() -> None:
    sides = [(rank, pickle.loads(pickle.dumps(diff_tree.partial(each)))) for rank, each in enumerate((BASE, OTHER))]
    assert diff_tree.combine(sides).rows() == compare(diff_tree, BASE, OTHER).rows()


def test_several_ranks_have_no_tree_together() -> None:
    side_of = diff_tree.partial(BASE)
    with pytest.raises(ViewError, match="view diff_tree cannot compare jobs of several ranks: choose one rank"):
        compare_jobs(diff_tree, [side_of, side_of], [side_of, side_of])


def test_a_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ViewError, match=r"0-9.* node 0 has 4 children"):
        compare(diff_tree, BASE, OTHER, path="0-9")
    with pytest.raises(ViewError, match="is not the path of a node"):
        compare(diff_tree, BASE, OTHER, path="1-x")


def test_empty_traces_are_blank() -> None:
    empty = Context(trace({}))
    assert [(row["name_baseline"], row["total_delta_us"]) for row in compare(diff_tree, empty, empty).rows()] == [
        ("Blank", 0)
    ]
    assert len(compare(diff_tree_operators, empty, BASE)) == 3
