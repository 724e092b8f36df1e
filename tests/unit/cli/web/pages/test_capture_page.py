"""What the page of a capture offers."""

from kinetoctl.web.pages.capture_page import OTHERS, grouped


def test_views_are_in_the_order_of_their_groups_words_whatever_order_they_were_registered_in() -> None:
    names = ["call_tree", "roofline", "operators_of_mine", "new", "operators", "counters_by_kernel", "modules"]
    for order in (names, names[::-1]):
        found = grouped([{"name": name, "description": f"About {name}."} for name in order])
        assert [(group, [view["name"] for view in views]) for group, views in found] == [
            ("GPU", ["counters_by_kernel", "roofline"]),
            ("Host and Python", ["operators", "operators_of_mine", "modules", "call_tree"]),
            (OTHERS, ["new"]),
        ]
