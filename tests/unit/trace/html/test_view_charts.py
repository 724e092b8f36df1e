"""Charts of views."""

import re
from typing import Any

import pytest
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.html.view_charts import MAX_BARS, SHAPES, Bars, chart
from kineto_trace.view_api.result import Result, make_result


def of(view: str, rows: int = 2, **given: list[Any]) -> Result:
    """A result with these columns; others have a value that fits their type."""
    blank: dict[str, Any] = {"text": "x", "int": 1, "float": 1.0, "bool": True, "ints": [1], "texts": ["x"]}
    schema = VIEWS[view].result_columns
    values = {column.name: given.get(column.name, [blank[column.type]] * rows) for column in schema}
    return make_result(view, schema, values)


@pytest.mark.parametrize("view", SHAPES)
def test_every_shape_names_columns_that_its_view_has(view: str) -> None:
    shape = SHAPES[view]
    names = {column.name for column in VIEWS[view].result_columns}
    wanted = {*shape.labels, *shape.pieces} if isinstance(shape, Bars) else {*shape.places, shape.time, *shape.values}
    assert wanted <= names


@pytest.mark.parametrize("view", [name for name, shape in SHAPES.items() if isinstance(shape, Bars)])
def test_bars_are_drawn_of_every_view_that_has_them(view: str) -> None:
    assert "<rect" in chart(of(view))


def test_bars_show_the_first_rows_in_their_order() -> None:
    count = MAX_BARS + 3
    names, times = [f"k{n}" for n in range(count)], [1000.0 * n + 1 for n in range(count)]
    drawn = chart(of("kernels", count, name=names, total_us=times))
    assert re.findall(r">(k\d+)</text>", drawn) == [f"k{n}" for n in range(MAX_BARS)]


def test_the_mean_step_the_use_of_tensor_cores_and_the_overlap_of_communication_have_bars_of_all_their_parts() -> None:
    parts = {"overview": 9, "tensor_core_use": 2, "distributed_overlap": 4}
    for view, count in parts.items():
        assert len(set(re.findall(r'class="series-(\d+)"', chart(of(view, 1))))) == count, view


def test_lines_are_drawn_per_place() -> None:
    drawn = chart(of("queue_length", 4, stream=[7, 7, 9, 9], time_us=[0.0, 1e3, 0.0, 2e3], queue_length=[1, 2, 3, 4]))
    assert re.findall(r"<h4>(.*?)</h4>", drawn) == ["rank 1, device 1, stream 7", "rank 1, device 1, stream 9"]


def test_names_are_escaped() -> None:
    drawn = chart(of("kernels", 1, name=["<script>alert(1)</script>"]))
    assert "<script" not in drawn
    assert "&lt;script" in drawn


def test_a_result_without_rows_or_a_view_without_a_shape_has_no_chart() -> None:
    assert chart(of("kernels", 0)) == ""
    assert chart(of("settings")) == ""
