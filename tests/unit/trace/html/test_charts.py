"""Bars, lines, boxes and histograms."""

import re

import pytest
from kineto_trace.html.charts import (
    Box,
    FieldPoint,
    Pair,
    Series,
    boxes,
    difference_bars,
    figure,
    histogram,
    lines,
    pair_bars,
    point_field,
    stacked_bars,
)


def test_a_bar_is_as_long_as_its_value() -> None:
    drawn = str(stacked_bars(["a", "<b>"], [Series("one", [10.0, 5.0]), Series("none", [0.0, None])], "ms"))
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
    assert widths == [100, 50]
    assert "&lt;b&gt;" in drawn and "<b>" not in drawn
    assert "none" not in drawn.partition("<svg")[0].partition('role="img"')[0]
    assert stacked_bars(["a"], [Series("one", [0.0])], "ms") == ""


def test_labels_that_are_cut_still_differ() -> None:
    labels = [f"void at::native::vectorized_elementwise_kernel<4, {name}Functor<float>, {'x' * 60}>" for name in "AB"]
    drawn = str(stacked_bars(labels, [Series("one", [10.0, 5.0])], "ms"))
    assert "AFunctor" in drawn.split("chart-label")[1].split("</span>")[0]
    assert "BFunctor" in drawn.split("chart-label")[2].split("</span>")[0]
    spread = Box(least=1, lower=2, median=5, upper=8, most=10)
    for picture in (
        boxes(labels, [spread, spread], "ms"),
        pair_bars([Pair(label=label, baseline=1.0, other=2.0) for label in labels], "ms"),
        difference_bars([Pair(label=label, baseline=1.0, other=2.0) for label in labels], "ms"),
    ):
        found = re.findall(r'chart-label">([^<]*)', str(picture).replace("&lt;", ""))
        assert len(set(found)) == 2


def test_a_line_holds_its_value_until_the_next_one() -> None:
    drawn = str(lines([0.0, 10.0, 20.0], [Series("v", [0.0, None, 100.0])], unit="%", time_unit="ms"))
    points = re.findall(r'points="([^"]*)"', drawn)[0].split()
    assert len(points) == 3  # two values, and a corner between them
    assert points[0].split(",")[1] == points[1].split(",")[1]
    assert points[1].split(",")[0] == points[2].split(",")[0]
    assert lines([0.0, 1.0], [Series("v", [None, None])], unit="%", time_unit="ms") == ""


def test_axes_have_round_numbers() -> None:
    drawn = str(lines([0.0, 37.0], [Series("v", [0.0, 730.0])], unit="ms", time_unit="ms"))
    assert re.findall(r">([\d,.]+)</text>", drawn) == ["0", "200", "400", "600", "800", "0", "10", "20", "30"]


def test_a_box_spans_the_middle_half_and_its_whisker_all_values() -> None:
    drawn = str(boxes(["a"], [Box(least=1, lower=2, median=5, upper=8, most=10)], "ms"))
    assert re.findall(r'x="([\d.]+)"[^>]*width="([\d.]+)"', drawn) == [("10", "90"), ("20", "60"), ("50", "0.4")]


def test_a_histogram_counts_the_values_of_each_part_of_the_range() -> None:
    drawn = str(histogram([1, 4], 10.0, 20.0, "duration", "ms"))
    assert "10 to 15 ms: 1" in drawn and "15 to 20 ms: 4" in drawn
    assert histogram([3], 1.0, 1.0, "duration", "ms") == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1234567.8, "1,234,568"), (12.345, "12.3"), (0.01234, "0.012"), (19.0, "19"), (-2.5, "-2.5")],
)
def test_figures_have_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_points_lie_at_their_percentages_and_their_areas_are_their_shares() -> None:
    points = [
        FieldPoint(label="small <b>", across=10.0, up=90.0, kind="compute-bound", size=4.0),
        FieldPoint(label="large", across=85.0, up=120.0, kind="memory-bound", size=64.0),
    ]
    drawn = str(point_field(points, "DRAM", "computing"))
    circles = re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)%" r="([\d.]+)" class="point series-(\d)"', drawn)
    assert circles == [("85", "0", "23", "1"), ("10", "10", "8", "0")]  # the larger one is below
    assert "small &lt;b&gt;: DRAM 10 %, computing 90 %, 4 % of the time, compute-bound" in drawn
    assert "memory-bound</span>" in drawn
    assert point_field([], "DRAM", "computing") == ""
