"""Pictures of results: what is drawn of which view."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import matplotlib as mpl
import pytest
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.errors import ViewError
from kineto_trace.view_api.plot_shapes import SHAPES, Spread
from kineto_trace.view_api.result import Result, make_result
from kineto_trace.view_api.result_plots import MAX_BARS

mpl.use("Agg")
from matplotlib import pyplot as plt

EVIL = r"_$\frac{$ <b>" + "\u202e" + "x" * 500


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def result(view: str, rows: int = 3, **values: Any) -> Result:
    """Made up: texts are the number of their row, times one second apart."""
    schema = VIEWS[view].result_columns
    made = {"int": list(range(rows)), "float": [1.5] * rows, "text": [str(row) for row in range(rows)]}
    lists: dict[str, list[Any]] = {"bool": [True] * rows, "ints": [[1]] * rows, "texts": [["a"]] * rows}
    return make_result(view, schema, {c.name: values.get(c.name, {**made, **lists}[c.type]) for c in schema})


def drawn(axes: Any) -> list[str]:
    axes.figure.canvas.draw()
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


@pytest.mark.parametrize("view", sorted(SHAPES))
def test_every_view_with_a_shape_is_drawn(view: str) -> None:
    shape = SHAPES[view]
    known = {column.name for column in VIEWS[view].result_columns}
    used = [getattr(shape, field.name) for field in fields(shape)]
    names = {name for each in used for name in ([each] if isinstance(each, str) else each)} - {"", "average"}
    if isinstance(shape, Spread):
        names = names - {shape.suffix} | {f"{name}{shape.suffix}" for name in ("min", "p25", "p50", "p75", "max")}
    assert names <= known
    axes = result(view).plot()
    drawn(axes)
    assert axes.get_title() == view.replace("_", " ")
    assert axes.get_xlabel()
    assert axes.lines or axes.patches or axes.collections


def test_values_over_time_are_one_line_for_each_gpu_in_the_order_of_time() -> None:
    axes = result(
        "gpu_utilization", 4, rank=[0] * 4, device=[0, 1, 0, 1], start_ns=[5_000_000, 1_000_000, 2_000_000, 9_000_000],
        utilization_pct=[10.0, 20.0, None, 40.0],
    ).plot()  # fmt: skip
    assert drawn(axes) == ["device 0", "device 1"]
    assert [line.get_xdata().tolist() for line in axes.lines] == [[1.0, 4.0], [0.0, 8.0]]
    assert axes.lines[1].get_ydata().tolist() == [20.0, 40.0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("ms since the first value", "utilization (%)")


def test_parts_of_a_step_are_stacked_and_those_of_no_length_left_out() -> None:
    names = [column.name for column in VIEWS["step_breakdown"].columns if column.name.endswith("_us")]
    values: dict[str, Any] = {name: [0.0, 0.0] for name in names}
    values |= {"kernel_us": [1000.0, 2000.0], "other_us": [500.0, None], "rank": [0, 0], "step": ["1", "2"]}
    axes = result("step_breakdown", 2, **values).plot()
    assert drawn(axes) == ["kernel", "other"]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 1), (0, 2), (1, 0.5), (2, 0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["step 1", "step 2"]


def test_rows_that_name_a_part_become_one_bar_for_each_gpu() -> None:
    axes = result(
        "idle_causes", 3, rank=[0, 0, 0], device=[0, 0, 1], cause=["host", "other", "host"], window_pct=[1.0, 2.0, 4.0]
    ).plot()
    assert drawn(axes) == ["host", "other"]
    assert [bar.get_width() for bar in axes.patches] == [1, 4, 2, 0]


@pytest.mark.parametrize(
    ("largest_us", "width", "unit"), [(2.5, 2.5, "µs"), (2500.0, 2.5, "ms"), (2.5e6, 2.5, "s"), (None, None, "µs")]
)
def test_times_have_the_unit_that_fits_the_largest(largest_us: float | None, width: float | None, unit: str) -> None:
    axes = result("kernels", 2, total_us=[largest_us, None]).plot()
    assert axes.get_xlabel() == unit
    assert [bar.get_width() for bar in axes.patches] == ([] if width is None else [pytest.approx(width), 0])


def test_more_bars_than_anybody_reads_are_counted_in_the_title() -> None:
    axes = result("step_phases", 100).plot()
    assert axes.get_title() == f"step phases ({MAX_BARS} of 100 bars)"


def test_it_draws_into_the_axes_that_it_is_given() -> None:
    _, (left, right) = plt.subplots(1, 2)
    assert result("idle_gaps").plot(ax=right) is right
    assert not left.patches and right.patches


def test_a_text_of_a_trace_is_drawn_as_it_is() -> None:
    axes = result("kernels", 2, name=[EVIL, "$x$"]).plot()
    drawn(axes)
    first, second = (label.get_text() for label in axes.get_yticklabels())
    assert "\u202e" not in first and len(first) < 60
    assert second == r"rank 1, \$x\$"
    assert len(drawn(result("idle_causes", 2, cause=[EVIL, "_b"]).plot())) == 2


def test_a_view_without_a_shape_says_which_views_have_one() -> None:
    with pytest.raises(ViewError, match=r"^view settings cannot be plotted; these can: annotation_latency, call_"):
        result("settings").plot()


def test_a_result_without_rows_says_why() -> None:
    empty = Result("idle_gaps", VIEWS["idle_gaps"].result_columns, result("idle_gaps", 0).table, ("no GPU",))
    with pytest.raises(ViewError, match=r"^view idle_gaps has no rows to plot: no GPU$"):
        empty.plot()
