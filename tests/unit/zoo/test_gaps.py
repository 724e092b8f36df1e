from collections.abc import Sequence

import pytest
from campaign.attach_targets.control import FIRST_GAP, GAPS, LAST, MOST_GAPS, longest_gap_ns

SECOND = 1_000_000_000


def page(last_s: float, *gaps_s: tuple[float, float]) -> Sequence[int]:
    """A page with gaps, each by its end and length."""
    words = [0] * FIRST_GAP
    words[LAST], words[GAPS] = int(last_s * SECOND), len(gaps_s)
    return words + [int(value * SECOND) for gap in gaps_s for value in gap]


def longest_s(words: Sequence[int], begin_s: float, end_s: float) -> float:
    return longest_gap_ns(words, int(begin_s * SECOND), int(end_s * SECOND)) / SECOND


def test_a_gap_counts_in_every_window_that_it_overlaps() -> None:
    words = page(30, (10, 3), (20, 5), (30, 1))
    assert [longest_s(words, *window) for window in ((0, 5), (0, 8), (8, 12), (10, 16), (21, 30))] == [0, 3, 3, 5, 1]


def test_a_gap_that_has_not_ended_counts_up_to_the_end_of_the_window() -> None:
    assert longest_s(page(10, (10, 1)), 9, 14) == 4


def test_laps_that_are_all_short_leave_no_gap() -> None:
    assert longest_s(page(14), 9, 14) == 0


def test_a_window_that_is_no_longer_known_is_refused() -> None:
    words = [0] * (FIRST_GAP + 2 * MOST_GAPS)
    words[LAST], words[GAPS] = 100, MOST_GAPS + 1
    words[FIRST_GAP::2] = [99] * MOST_GAPS
    with pytest.raises(ValueError, match="overwritten"):
        longest_gap_ns(words, 0, 100)
