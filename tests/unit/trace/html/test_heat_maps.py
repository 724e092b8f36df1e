"""A map stays small and legible whatever its size, and says what a cell stands for."""

import re

import numpy as np
from kineto_trace.html.heat_maps import (
    BLOCK_WIDTH,
    LINES,
    MAX_COLUMNS,
    MAX_ROWS,
    Axis,
    Block,
    Span,
    bins,
    block_map,
    heat_map,
)


def axis(title: str, count: int) -> Axis:
    def href(span: Span) -> str:
        return f"/{title}?{span[0]}-{span[1]}"

    return Axis(title=title, names=[str(at) for at in range(count)], href=href)


def drawn(values: list[list[float]]) -> str:
    array = np.array(values)
    return str(heat_map(array, axis("rank", array.shape[0]), axis("step", array.shape[1]), "{:g} us".format))


def test_a_small_map_has_a_cell_for_each_value_and_the_extremes_have_the_extreme_colours() -> None:
    text = drawn([[1.0, 2.0], [9.0, float("nan")]])
    assert re.findall(r'class="heat-(\w+)"><title>([^<]*)</title>', text) == [
        ("0", "rank 0, step 0: 1 us"),
        ("1", "rank 0, step 1: 2 us"),
        ("8", "rank 1, step 0: 9 us"),
        ("none", "rank 1, step 1: unknown"),
    ]
    assert 'href="/rank?1-1"' in text and 'href="/step?0-0"' in text
    assert "Each cell" not in text


def test_a_large_map_is_binned_by_the_largest_value_and_says_so() -> None:
    values = np.ones((256, 1000))
    values[201, 777] = 5.0
    text = str(heat_map(values, axis("rank", 256), axis("step", 1000), "{:g} us".format))
    assert text.count("<rect") == 64 * 100
    assert len(text) < 1_500_000
    assert "rank 200-203, step 770-779: 5 us" in text
    assert "Each cell shows the largest value of 4 ranks and 10 steps." in text


def test_labels_have_room_and_lead_to_all_that_they_stand_for() -> None:
    text = str(heat_map(np.ones((2, 100)) * np.arange(100), axis("rank", 2), axis("step", 100), str))
    spans = [(int(first), int(last)) for first, last in re.findall(r'href="/step\?(\d+)-(\d+)"', text)]
    assert [first for first, _ in spans[1:]] == [last + 1 for _, last in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, 99)
    assert len(spans) < 20


def test_equal_values_and_no_values_are_drawn() -> None:
    assert 'class="heat-0"' in drawn([[3.0, 3.0]])
    assert drawn([[float("nan")]]) == ""
    assert drawn([[]]) == ""


def test_bins_cover_everything_once() -> None:
    assert bins(10, 4) == [(0, 2), (3, 5), (6, 8), (9, 9)]
    assert bins(0, 4) == []
    for count in (1, MAX_ROWS, MAX_COLUMNS + 1, 1000):
        spans = bins(count, MAX_COLUMNS)
        assert len(spans) <= MAX_COLUMNS
        assert [place for first, last in spans for place in range(first, last + 1)] == list(range(count))


def test_the_legend_is_one_scale_from_the_least_to_where_the_last_colour_begins() -> None:
    text = drawn([[18.0, 20.0], [20.0, 27.0]])
    legend = re.sub(r'<i class="heat-(\d)"></i>', r"[\1]", text[text.index('scale">') + 7 : text.index("</span>")])
    assert re.fullmatch(r"18 us \[0\]\[1\]\[2\]\[3\]\[4\]\[5\]\[6\]\[7\]\[8\] from 2[56][.\d]* us", legend)
    assert 'scale">3 us <i class="heat-0"></i> </span>' in drawn([[3.0, 3.0]])


def bars(text: str) -> list[tuple[float, int, float, str]]:
    """x, line, width and title of each bar."""
    found = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)"[^>]*><title>([^<]*)', text)
    return [(float(x), int(y) // 25, float(width), title) for x, y, width, title in found]


def test_bars_are_as_long_as_their_blocks_and_go_on_in_the_next_line() -> None:
    drawn = bars(str(block_map([Block(LINES + 3, 0, "a"), Block(LINES - 3, 1, "b")], "")))
    assert [(line, title) for _, line, _, title in drawn] == [
        (0, "a"), (1, "a"), (2, "a"), (3, "a"), (4, "a"), (4, "b"), (5, "b"),
    ]  # fmt: skip
    widths = {name: sum(width for _, _, width, title in drawn if title == name) for name in "ab"}
    assert widths == {"a": (LINES + 3) * BLOCK_WIDTH / 2, "b": (LINES - 3) * BLOCK_WIDTH / 2}


def test_blocks_too_small_to_be_seen_are_drawn_together() -> None:
    drawn = bars(str(block_map([Block(1_000_000, 0, "large"), *[Block(10, 1, "small")] * 500], "")))
    assert drawn[-1][3] == "500 blocks too small to draw"
    assert "small" not in [title for *_, title in drawn]


def test_no_bytes_are_no_map_and_titles_are_text() -> None:
    assert block_map([], "") == ""
    assert "<b>" not in str(block_map([Block(1, 0, "<b>")], "<b>"))
