"""What a flame graph says and where it draws it."""

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from kineto_trace.analysis.flame_trees import FlameKind, FlameNode
from kineto_trace.html.flame_chart import MAX_NAME, difference_class, flame_chart

EVIL = "</title><script>alert(1)</script>\u202e&"


def node(name: str, start: int, total: int, *children: FlameNode, **changes: Any) -> FlameNode:
    own = total - sum(child.total for child in children)
    made = FlameNode(
        name=name, kind=FlameKind.OPERATOR, key=name, start=start, width=total, total=total, own=own, children=children
    )
    return replace(made, **changes)


GRAPH = node("all", 0, 4000, node("a", 0, 3000, node("b", 1000, 1000)), node(EVIL, 3000, 1000))


def drawn(root: FlameNode, **options: Any) -> list[tuple[str, float, float, float]]:
    """Of each frame the first line of its title, and where it is: x, y, width."""
    svg = ElementTree.fromstring(flame_chart(root, name="x", **options))
    found = []
    for frame in svg:
        rect = frame.find("rect")
        assert rect is not None
        x, y, width = (float(rect.attrib[key]) for key in ("x", "y", "width"))
        found.append(((frame.findtext("title") or "").split("\n")[0], x, y, width))
    return found


def test_frames_are_as_wide_as_their_time_below_their_callers() -> None:
    assert drawn(GRAPH) == [
        ("all", 0, 0, 1200),
        ("a", 0, 19, 900),
        ("b", 300, 38, 300),
        ("</title><script>alert(1)</script>\\u202e&", 900, 19, 300),
    ]


def test_callers_are_drawn_above() -> None:
    assert [(name, y) for name, _, y, _ in drawn(GRAPH, upward=True)][:3] == [("all", 38), ("a", 19), ("b", 0)]


def test_names_of_a_trace_are_text() -> None:
    text = flame_chart(GRAPH, name=EVIL, link=lambda each: f"/c?root={each.name}")
    assert "<script" not in text
    assert 'href="/c?root=&lt;/title&gt;' in text


def test_long_names_are_cut_in_the_middle() -> None:
    (name, *_place) = drawn(node("n" * 5000, 0, 1))[0]
    assert len(name) == MAX_NAME


def test_titles_have_totals_shares_and_own_times() -> None:
    text = flame_chart(GRAPH, name="x")
    assert "<title>a\n3 µs, 75 %; self 2 µs</title>" in text
    assert "<title>b\n1 µs, 25 %</title>" in text
    others = node("(others)", 0, 1000, kind=FlameKind.OTHERS, frames=3)
    assert "1 µs, 50 %; 3 frames too narrow to draw" in flame_chart(others, name="x", whole=2000)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (2000.0, "+500 ns per step (+50 %)"),
        (4000.0, "-500 ns per step (-25 %)"),
        (0.0, "+1.5 µs per step (not in the baseline)"),
    ],
)
def test_differences_are_signed_and_per_step(base: float, said: str) -> None:
    changed = node("a", 0, 3000, base_total=base, base_own=base)
    assert said in flame_chart(changed, name="x", periods=2, per="step")


def test_more_is_red_less_is_blue_and_noise_has_no_colour() -> None:
    pairs = [(100, 101), (110, 100), (100, 200), (200, 20), (20, 200), (5, 0), (0, 5), (0, 0)]
    assert [difference_class(value, base) for value, base in pairs] == [
        *("same", "more-1", "less-3", "more-4", "less-4", "more-4", "less-4", "same"),
    ]


def test_samples_are_numbers() -> None:
    assert "1,200 samples, 100 %" in flame_chart(node("f", 0, 1200), name="x", unit="samples")


def test_nothing_is_drawn_of_nothing() -> None:
    assert flame_chart(node("all", 0, 0), name="x") == ""


def test_labels_fit_into_their_frames() -> None:
    wide = node("all", 0, 100, node("a_long_name_of_a_function", 0, 5), node("x" * 400, 5, 95))
    labels = re.findall(r"<text[^>]*>([^<]*)", flame_chart(wide, name="x"))
    assert labels[1] == "a_long_…"
    assert 150 < len(labels[2]) < 180
