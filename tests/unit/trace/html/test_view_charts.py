"""Charts of views."""

import re
from typing import Any

import pytest
from kineto_trace.analysis.cause_views import CAUSES
from kineto_trace.analysis.diff.view_differences import COMPARED, Extent, view_differences
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.html.view_charts import MAX_BARS, MAX_CHARTS, bar_count, chart, pairs
from kineto_trace.view_api.plot_shapes import SHAPES, Curve, Histogram, Pairs, Points, bar_columns
from kineto_trace.view_api.result import Result, make_result


def of(view: str, rows: int = 2, **given: list[Any]) -> Result:
    """A result with these columns; others have a value that fits their type."""
    blank: dict[str, Any] = {"text": "x", "int": 1, "float": 1.0, "bool": True, "ints": [1], "texts": ["x"]}
    schema = VIEWS[view].result_columns
    values = {column.name: given.get(column.name, [blank[column.type]] * rows) for column in schema}
    return make_result(view, schema, values)


@pytest.mark.parametrize("view", SHAPES)
def test_every_view_with_a_shape_is_drawn(view: str) -> None:
    times: dict[str, Any] = {"start_ns": [0, 1_000_000], "time_ns": [0, 1_000_000], "start_us": [0.0, 1e3]}
    spread: dict[str, Any] = (
        {"duration_us": [1.0, 2.0], "idle_us": [1.0, 2.0]} if isinstance(SHAPES[view], Histogram) else {}
    )
    drawn = chart(of(view, 2, **times, **spread))
    assert {Curve: "<polyline", Points: "<circle"}.get(type(SHAPES[view]), "<rect") in drawn


def test_bars_show_the_first_rows_in_their_order() -> None:
    count = MAX_BARS + 3
    names, times = [f"k{n}" for n in range(count)], [1000.0 * n + 1 for n in range(count)]
    drawn = chart(of("kernels", count, name=names, total_us=times))
    assert re.findall(r">(k\d+)</span>", drawn) == [f"k{n}" for n in range(MAX_BARS)]


def test_as_many_bars_are_drawn_as_are_wanted() -> None:
    found = of("kernels", 40, name=[f"k{n}" for n in range(40)])
    assert (chart(found, bars=30).count('class="chart-row"'), bar_count(found)) == (30, 40)
    assert (bar_count(of("kernels", 0)), bar_count(of("queue_length", 4))) == (0, 0)
    two = of("time_causes", 4, device=[0, 0, 1, 1], cause=["host", "sync", "host", "sync"])
    assert (chart(two, bars=1).count('class="chart-row"'), bar_count(two)) == (1, 2)


def test_bars_of_another_column_begin_with_the_longest_but_those_of_steps_stay_in_order() -> None:
    drawn = chart(of("kernels", 4, name=["a", "b", "c", "d"], calls=[1, 7, None, 3]), "calls", 3)
    assert re.findall(r">([a-d])</span>", drawn) == ["b", "d", "a"]
    assert "Chart of calls in count" in drawn
    drawn = chart(of("step_phases", 3, step=["1", "2", "3"], total_us=[1.0, 7.0, 3.0]), "total_us")
    assert re.findall(r'"chart-label">([^<]*)', drawn) == ["step 1", "step 2", "step 3"]


def test_every_column_that_a_chart_can_be_of_is_drawn() -> None:
    offered = {view: bar_columns(view) for view in SHAPES if bar_columns(view)}
    assert offered["operators"][2:4] == ("device_total_us", "host_total_us")
    for view, names in offered.items():
        for name in names:
            assert "<rect" in chart(of(view), name), f"{view}.{name}"


def test_the_mean_step_the_use_of_tensor_cores_and_the_overlap_of_communication_have_bars_of_all_their_parts() -> None:
    parts = {"overview": 9, "tensor_core_use": 2, "distributed_overlap": 4}
    for view, count in parts.items():
        assert len(set(re.findall(r'class="series-(\d+)"', chart(of(view, 1))))) == count, view


def test_lines_are_drawn_per_place() -> None:
    moments = [0, 1_000_000, 0, 2_000_000]
    drawn = chart(of("queue_length", 4, stream=[7, 7, 9, 9], time_ns=moments, queue_length=[1, 2, 3, 4]))
    assert re.findall(r'<p class="chart-title">(.*?)</p>', drawn) == ["stream 7", "stream 9"]
    assert "Chart of queue length in count over time in ms" in drawn


def test_lines_beyond_the_first_places_are_told() -> None:
    drawn = {count: chart(of("counter_curves", 2 * count, device=[at // 2 for at in range(2 * count)],
                             time_ns=list(range(2 * count)))) for count in (MAX_CHARTS, 40)}  # fmt: skip
    assert [each.count("<polyline") for each in drawn.values()] == [MAX_CHARTS] * 2
    assert "charts. The view" not in drawn[MAX_CHARTS]
    assert "These are the first 8 of 40 charts. The view counter_curves has all values." in drawn[40]


def test_causes_beyond_the_colours_are_drawn_together() -> None:
    shares = {**dict(zip(CAUSES, range(16, 6, -1), strict=False)), "others": 4}  # ten causes: 16 % to 7 %
    drawn = chart(of("time_causes", len(shares), rank=[0] * 11, device=[0] * 11, cause=list(shares),
                     share_pct=[float(share) for share in shares.values()]))  # fmt: skip
    keys = re.findall(r'<i class="series-(\d)"></i>([^<]+)<', drawn)
    assert [number for number, _ in keys] == [str(n) for n in range(9)]
    assert (keys[0][1], keys[-1][1]) == ("matrix products 16 %", "others 19 %")  # 8 + 7 + 4
    assert "others: 19 % (16.0 %)" in drawn  # of 119


def test_what_the_parts_of_a_bar_leave_is_its_rest() -> None:
    drawn = chart(of("ranks", 2, rank=[0, 1], computation_us=[6e3, 5e3], communication_us=[1e3, 1e3],
                     step_us=[9e3, 9e3]))  # fmt: skip
    assert "rank 0, rest: 2 ms (22.2 %)" in drawn and "rank 1, rest: 3 ms (33.3 %)" in drawn


def test_of_several_ranks_the_average_steps_are_drawn() -> None:
    drawn = chart(of("step_breakdown", 4, rank=[0, 0, 1, 1], step=["1", "average", "1", "average"]))
    assert re.findall(r'chart-label">([^<]*)<', drawn) == ["rank 0, step average", "rank 1, step average"]


def test_a_share_is_drawn_on_a_scale_to_the_whole() -> None:
    drawn = chart(of("findings", 1, title=["x"], saving_pct=[25.0]))
    assert re.findall(r'width="([\d.]+)"', drawn) == ["25"]


def test_names_are_escaped() -> None:
    drawn = chart(of("kernels", 1, name=["<script>alert(1)</script>"]))
    assert "<script" not in drawn
    assert "&lt;script" in drawn


def test_a_result_without_rows_or_a_view_without_a_shape_has_no_chart() -> None:
    assert chart(of("kernels", 0)) == ""
    assert chart(of("settings")) == ""


def told(drawn: str) -> list[str]:
    """The values beside the bars."""
    return re.findall(r'chart-value">([^<]*)<', drawn)


def test_two_traces_have_two_bars_a_row_and_their_difference() -> None:
    drawn = chart(
        of(
            "diff_operators",
            3,
            name=["mm", "add", "copy"],
            time=["gpu"] * 3,
            verdict=["slower", "within noise", "gone"],
            baseline_us=[2e3, 1e3, 500.0],
            other_us=[3e3, 1.1e3, 0.0],
        )
    )
    assert told(drawn) == ["2 → 3 ms", "1 → 1.1 ms", "0.5 → 0 ms", "+1 ms", "+0.1 ms, within noise", "-0.5 ms"]
    assert re.findall(r"<title>mm, ([^<]*)<", drawn) == ["baseline: 2 ms", "this trace: 3 ms"]
    assert re.findall(r'height="0.84" class="([^"]*)"><title>(\w+):', drawn) == [
        ("series-5", "mm"),
        ("noise", "add"),
        ("series-0", "copy"),
    ]
    keys = re.findall(r'<i class="([^"]*)"></i>([^<]*)<', drawn)
    assert [text for _, text in keys] == [
        "baseline (upper bar)",
        "this trace (lower bar)",
        "more than in the baseline",
        "less",
        "within noise",
    ]


def test_small_differences_have_a_unit_of_their_own_and_rows_of_nothing_no_bars() -> None:
    drawn = chart(of("diff_operators", 2, name=["mm", "none"], baseline_us=[3e3, 0.0], other_us=[3000.25, 0.0]))
    assert told(drawn) == ["3 → 3 ms", "+0.25 µs"]


def test_of_the_tree_the_nodes_inside_are_drawn() -> None:
    drawn = chart(of("diff_tree", 3, depth=[0, 1, 1], path=["0", "0-0", "0-1"], name=["all", "a", "b"]))
    assert re.findall(r'chart-label">([^<]*)<', drawn)[:2] == ["0-0, a", "0-1, b"]


def test_bars_that_lead_elsewhere_are_links_and_no_picture() -> None:
    shape = SHAPES["diff_tree"]
    assert isinstance(shape, Pairs)
    result = of("diff_tree", 2, depth=[0, 1], path=["0", "0-0"], name=["all", "<b>"])
    assert 'role="img"' in pairs(result, shape)
    drawn = pairs(result, shape, hrefs=["", "/c/1?set.path=0-0"])
    assert 'role="img"' not in drawn
    assert drawn.count('href="/c/1?set.path=0-0"') == 2  # the label and the bars
    assert "&lt;b&gt;" in drawn and "<b>" not in drawn


def test_the_difference_of_a_view_is_drawn_with_all_its_figures_if_there_is_room() -> None:
    steps = [Extent(1.0, 0.1, frozenset({"1", "2"}))]
    phases = of("step_phases", 2, rank=[0, 0], step=["1", "2"], total_us=[5e3, 5e3], forward_us=[2e3, 2e3])
    longer = of("step_phases", 2, rank=[0, 0], step=["1", "2"], total_us=[9e3, 9e3], forward_us=[6e3, 6e3])
    found = view_differences(phases, longer, ({0: steps[0]}, {0: steps[0]}))
    drawn = chart(found)
    assert re.findall(r'chart-label">rank 0, ([^<]*)<', drawn)[:3] == ["total", "loading", "forward"]
    assert told(drawn)[0] == "5 → 9 ms"
    many = of("kernels_by_op", MAX_BARS, name=[f"k{n}" for n in range(MAX_BARS)], total_us=[1e3] * MAX_BARS)
    drawn = chart(view_differences(many, many, ({0: steps[0]}, {0: steps[0]})))
    assert re.findall(r'chart-title">([^<]*)<', drawn) == ["Both traces: total"]
    assert len(re.findall(r'chart-label">k\d+<', drawn)) == MAX_BARS


@pytest.mark.parametrize("view", [view for view, how in COMPARED.items() if "unit" not in how.keys])
def test_the_difference_of_every_compared_view_has_a_chart(view: str) -> None:
    extent = {1: Extent(1.0, 0.1, frozenset({"x", "1"}))}
    result = of(view, 1, rank=[1])
    assert "<rect" in chart(view_differences(result, result, (extent, extent)))


def test_figures_of_different_units_are_not_drawn_on_one_scale() -> None:
    extent = {1: Extent(1.0, 0.1, frozenset({"x", "1"}))}
    result = of("counter_summary", 2, rank=[1, 1], unit=["bytes", "cores"])
    assert chart(view_differences(result, result, (extent, extent))) == ""
