"""Searches for many questions at once give what a loop would."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.arrays.id_sets import last_reaching
from kineto_trace.arrays.intervals import innermost_spans
from kineto_trace.arrays.row_groups import group_sequences

small = st.integers(0, 12)


@given(st.lists(small, max_size=20), st.lists(st.tuples(st.integers(0, 20), small), max_size=20))
def test_the_last_value_that_reaches(values: list[int], questions: list[tuple[int, int]]) -> None:
    questions = [(min(before, len(values)), needed) for before, needed in questions]
    expected = [
        max((place for place in range(before) if values[place] >= needed), default=-1) for before, needed in questions
    ]
    asked = np.array(questions, np.int64).reshape(-1, 2)
    assert last_reaching(np.array(values, np.int64), asked[:, 0], asked[:, 1]).tolist() == expected


spans = st.lists(st.tuples(st.integers(0, 2), small, st.integers(1, 9)), max_size=12)


@given(spans, spans, st.randoms(use_true_random=False))
def test_the_span_with_the_highest_priority_that_overlaps(
    intervals: list[tuple[int, int, int]], painted: list[tuple[int, int, int]], random: object
) -> None:
    priority = list(range(len(painted)))
    random.shuffle(priority)  # type: ignore[attr-defined]
    expected = []
    for track, start, length in intervals:
        over = [
            place
            for place, (other, low, size) in enumerate(painted)
            if other == track and start < low + size and low < start + length
        ]
        expected.append(max(over, key=lambda place: priority[place], default=-1))
    first, second = (np.array(rows, np.int64).reshape(-1, 3) for rows in (intervals, painted))
    found = innermost_spans(
        first[:, 0],
        (first[:, 1], first[:, 1] + first[:, 2]),
        second[:, 0],
        (second[:, 1], second[:, 1] + second[:, 2]),
        np.array(priority, np.int64),
    )
    assert found.tolist() == expected


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=20))
def test_equal_sequences_are_one_group(sequences: list[list[int]]) -> None:
    numbers: dict[tuple[int, ...], int] = {}
    expected = [numbers.setdefault(tuple(sequence), len(numbers)) for sequence in sequences]
    lengths = [len(sequence) for sequence in sequences]
    values = np.array([value for sequence in sequences for value in sequence], np.int64)
    found = group_sequences(values, np.cumsum([0, *lengths], dtype=np.int64)[:-1])
    assert found.number.tolist() == expected
    assert found.size.tolist() == [expected.count(number) for number in range(len(numbers))]
    assert [tuple(sequences[place]) for place in found.example.tolist()] == list(numbers)
