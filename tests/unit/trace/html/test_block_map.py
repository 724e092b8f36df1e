import re

from kineto_trace.html.block_map import LINES, WIDTH, Block, block_map


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
    assert widths == {"a": (LINES + 3) * WIDTH / 2, "b": (LINES - 3) * WIDTH / 2}


def test_blocks_too_small_to_be_seen_are_drawn_together() -> None:
    drawn = bars(str(block_map([Block(1_000_000, 0, "large"), *[Block(10, 1, "small")] * 500], "")))
    assert drawn[-1][3] == "500 blocks too small to be seen"
    assert "small" not in [title for *_, title in drawn]


def test_no_bytes_are_no_map_and_titles_are_text() -> None:
    assert block_map([], "") == ""
    assert "<b>" not in str(block_map([Block(1, 0, "<b>")], "<b>"))
