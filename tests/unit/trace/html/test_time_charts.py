import re

from kineto_trace.html.charts import Series
from kineto_trace.html.time_charts import ChartLine, Marks, areas, curves


def test_a_value_holds_until_the_next_one() -> None:
    text = str(curves([ChartLine("held", [0.0, 10.0, 20.0], [0.0, 5.0, 5.0])], "bytes"))
    assert 'points="64,190 506,190 506,10 948,10"' in text
    assert "B; time in µs since the start" in text


def test_nothing_is_drawn_while_a_value_is_not_known() -> None:
    drawn = curves([ChartLine("DRAM", [0, 10, 20, 30, 40], [5, None, None, 7, None])], "%")
    runs = [points.split() for points in re.findall(r'points="([^"]*)"', drawn)]
    ends = [(run[0].split(",")[0], run[-1].split(",")[0]) for run in runs]
    assert ends == [("64", "285"), ("727", "948")]
    assert curves([ChartLine("DRAM", [0, 10], [None, None])], "%") == ""


def test_values_below_zero_are_inside_the_chart() -> None:
    text = str(curves([ChartLine("held", [0.0, 10.0], [-5.0, 5.0])], "bytes"))
    assert 'points="64,190 948,190 948,10"' in text


def test_areas_are_on_top_of_each_other() -> None:
    text = str(areas([0.0, 1.0], [Series("a", [1.0, 1.0]), Series("b", [1.0, 1.0])], "bytes"))
    assert 'points="64,100 948,100 948,190 64,190"' in text
    assert 'points="64,10 948,10 948,100 64,100"' in text


def test_what_is_no_curve_is_not_drawn_and_names_are_text() -> None:
    assert curves([ChartLine("one", [1.0], [1.0])], "") == ""
    assert areas([0.0, 1.0], [Series("a", [0.0, None])], "bytes") == ""
    assert "<b>" not in str(curves([ChartLine("<b>", [0.0, 1.0], [1.0, 2.0])], "<b>", Marks(moments=[(0.5, "<b>")])))


def test_a_chart_shows_moments_and_a_span_inside_of_it() -> None:
    line = [ChartLine("held", [0.0, 10.0], [0.0, 5.0])]
    text = str(curves(line, "bytes", Marks(moments=[(5.0, "peak"), (11.0, "later")], span=(-3.0, 5.0))))
    assert '<rect x="64" y="10" width="442" height="180" class="span"/>' in text
    assert ">peak</text>" in text
    assert "later" not in text
    assert 'data-first="0.0" data-last="10.0" data-left="64" data-right="948"' in text


def test_the_axes_have_round_numbers() -> None:
    text = str(curves([ChartLine("held", [0.0, 7_340.0], [-130.0, 817.0])], ""))
    labels = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="axis" text-anchor="(?:end|middle)">([^<]*)</text>', text)
    assert [label for x, label in labels if x == "58"] == ["0", "250", "500", "750"]
    assert [label for x, label in labels if x != "58"] == ["0", "2", "4", "6"]


def test_units_fit_the_largest_value() -> None:
    text = str(curves([ChartLine("read", [0.0, 2e6], [0.0, 3 * 2**30])], "B/s"))
    assert "GiB/s; time in s since the start; at most 3" in text
