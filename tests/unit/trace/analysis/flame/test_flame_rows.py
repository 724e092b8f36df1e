"""The flame graph of a result's rows."""

from typing import Any

from kineto_trace.analysis.flame.flame_nodes import NS, SAMPLES, FlameNode
from kineto_trace.analysis.flame.flame_rows import flame_of_rows
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.view_api.result import Result, make_result

Row = tuple[int, list[str], str | None, float | None, int | None]


def result(*rows: Row) -> Result:
    """Rows of rank, stack, kind of the innermost frame, self time in us, samples."""
    names = ("rank", "stack", "kind", "self_us", "samples")
    given: dict[str, Any] = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    schema = VIEWS["flame_graph"].result_columns
    return make_result("flame_graph", schema, {each.name: given.get(each.name, [None] * len(rows)) for each in schema})


def lines(node: FlameNode, level: int = 0) -> list[str]:
    own = [f"{'  ' * level}{node.name} {node.kind} {node.total}"]
    return own + [line for child in node.children for line in lines(child, level + 1)]


def test_stacks_of_all_ranks_are_merged_below_one_thread() -> None:
    found = flame_of_rows(
        result(
            (0, ["thread 1", "a", "b"], "operator", 3.0, None),
            (0, ["thread 1", "a"], "annotation", 1.0, None),
            (1, ["thread 9", "a", "b"], "operator", 2.0, None),
            (1, ["(others)"], None, 0.5, None),
        )
    )
    assert found is not None
    root, unit = found
    assert unit == NS
    assert lines(root) == [
        "all all 6500",
        "  all threads thread 6000",
        "    a annotation 6000",
        "      b operator 5000",
        "  (others) thread 500",
    ]


def test_a_frame_that_is_in_no_row_of_its_own_is_of_the_kind_of_what_it_called() -> None:
    found = flame_of_rows(result((0, ["thread 1", "f", "g"], "function", None, 4)))
    assert found is not None
    root, unit = found
    assert (unit, lines(root)[2]) == (SAMPLES, "    f function 4")


def test_without_rows_there_is_no_graph() -> None:
    assert flame_of_rows(result()) is None
