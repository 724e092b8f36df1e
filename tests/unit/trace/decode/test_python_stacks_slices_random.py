"""Slices of random samples against a plain reference, and what holds of them among random operators."""

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_trace.decode import python_stacks
from kineto_trace.model.trace import StringTable, Table
from kineto_trace.structure.nesting import build
from support.agent.stack_records import PERIOD_NS, Sample, code, node, recording
from support.trace_files.op_tables import spans

CODES = {1: code(1, "a.py", "f"), 2: code(2, "a.py", "g"), 3: code(3, "a.py", "h")}
PATHS = {0: "", 1: "f", 2: "fg", 3: "fgh", 4: "fh", 5: "h", 6: "fgf", 7: "fg", 8: "fghg"}  # 2 and 7: two lines
NODES = {
    number: node(parent, code_number, 0)
    for number, parent, code_number in (
        (1, 0, 1),
        (2, 1, 2),
        (3, 2, 3),
        (4, 1, 3),
        (5, 0, 3),
        (6, 2, 1),
        (7, 1, 2),
        (8, 3, 2),
    )
}

# Each tick: the time since the one before it in tenths of a period, and for each thread how late it was looked at and
# where it was (None: it was not seen).
_seen = st.none() | st.tuples(st.integers(0, 4), st.integers(0, len(PATHS) - 1))
_ticks = st.lists(st.tuples(st.sampled_from([6, 9, 10, 10, 10, 11, 25, 60]), st.tuples(_seen, _seen)), max_size=30)


def samples_of(ticks: list[tuple[int, tuple[tuple[int, int] | None, ...]]]) -> list[Sample]:
    tenth = PERIOD_NS // 10
    found, now = [], PERIOD_NS
    for gap, threads in ticks:
        now += gap * tenth
        found += [
            Sample(now + seen[0] * tenth // 2, thread, seen[1])
            for thread, seen in enumerate(threads, start=1)
            if seen is not None
        ]
    return found


class Slice(NamedTuple):
    thread: int
    depth: int
    name: str
    start: int
    end: int
    samples: int


def reference(samples: list[Sample]) -> list[Slice]:
    found: list[Slice] = []
    for thread in {sample.thread for sample in samples}:
        own = sorted(sample for sample in samples if sample.thread == thread)
        stack: list[Slice] = []
        for before, sample in zip([None, *own[:-1]], own, strict=True):
            if before is not None and not continues(before.time, sample.time, samples):
                found += [entry._replace(end=limit(before.time, samples)) for entry in stack]
                stack = []
            path = PATHS[sample.node]
            shared = 0
            while shared < min(len(path), len(stack)) and stack[shared].name == path[shared]:
                shared += 1
            found += [entry._replace(end=sample.time) for entry in stack[shared:]]
            stack = [entry._replace(samples=entry.samples + 1) for entry in stack[:shared]] + [
                Slice(thread, depth, path[depth], sample.time, 0, 1) for depth in range(shared, len(path))
            ]
        found += [entry._replace(end=limit(own[-1].time, samples)) for entry in stack]
    return sorted(found)


def continues(before: int, now: int, samples: list[Sample]) -> bool:
    half = PERIOD_NS // 2
    return now - before <= 5 * half or not any(before + half < sample.time < now - half for sample in samples)


def limit(last: int, samples: list[Sample]) -> int:
    later = [sample.time for sample in samples if sample.time > last + PERIOD_NS // 2]
    return min(min(later), last + 2 * PERIOD_NS) if later else last + PERIOD_NS


def decoded(samples: list[Sample]) -> tuple[Table, list[Slice]]:
    strings = StringTable()
    table = python_stacks.decode(recording(samples, codes=CODES, nodes=NODES), strings).tables["python_function"]
    names = [strings.strings[number][-1] for number in table["name"]]
    numbers = (table["thread"], table["depth"], table["start"], table.end(), table["samples"])
    rows = zip(names, *(column.tolist() for column in numbers), strict=True)
    return table, sorted(
        Slice(thread, depth, name, start, end, count) for name, thread, depth, start, end, count in rows
    )


@given(_ticks)
@settings(max_examples=100)
def test_slices_are_what_a_plain_reference_says(ticks: list[tuple[int, tuple[tuple[int, int] | None, ...]]]) -> None:
    samples = samples_of(ticks)
    assert decoded(samples)[1] == reference(samples)


@given(_ticks)
@settings(max_examples=100)
def test_slices_of_one_depth_never_overlap_nor_outlast_the_next_sample(
    ticks: list[tuple[int, tuple[tuple[int, int] | None, ...]]],
) -> None:
    samples = samples_of(ticks)
    table, _ = decoded(samples)
    assert overlaps(table["thread"], table["depth"], table["start"], table.end()) == 0
    last = {sample.thread: sample.time for sample in samples}
    for row in range(len(table)):
        times = sorted(sample.time for sample in samples if sample.thread == table["thread"][row])
        seen = [time for time in times if table["start"][row] <= time < table.end()[row]]
        later = [time for time in times if time > seen[-1]]
        assert table.end()[row] <= (later[0] if later else last[int(table["thread"][row])] + 2 * PERIOD_NS)


def overlaps(thread: np.ndarray, depth: np.ndarray, start: np.ndarray, end: np.ndarray) -> int:
    order = np.lexsort((end, start, depth, thread))
    first, second = order[:-1], order[1:]
    same = (thread[first] == thread[second]) & (depth[first] == depth[second])
    return int(np.count_nonzero(same & (end[first] > start[second])))


_operators = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 900)), max_size=25)


def nested_operators(drawn: list[tuple[int, int]], thread: int) -> list[tuple[int, int, int]]:
    """Intervals (start, end, thread) of which none overlaps another one in part, in hundredths of a period."""
    kept: list[tuple[int, int]] = []
    for start, length in drawn:
        end = start + length
        if all(end <= low or start >= high or (low <= start and end <= high) or (start <= low and high <= end)
               for low, high in kept):  # fmt: skip
            kept.append((start, end))
    unit = PERIOD_NS // 100
    return [(start * unit, end * unit, thread) for start, end in kept]


@given(_ticks, _operators, _operators)
@settings(max_examples=100)
def test_among_operators_slices_cut_none_and_keep_apart(
    ticks: list[tuple[int, tuple[tuple[int, int] | None, ...]]],
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
) -> None:
    table, _ = decoded(samples_of(ticks))
    drawn = nested_operators(first, 1) + nested_operators(second, 2)
    ops = spans("cpu_op", *((start, end) for start, end, _ in drawn), thread=[thread for *_, thread in drawn])
    tree = build({"cpu_op": ops, "python_function": table}, 1 << 40, sample_period_ns=PERIOD_NS)
    own = tree.nodes_of("cpu_op", len(ops))
    assert (tree.end[own] == ops.end()).all()
    nodes = tree.nodes_of("python_function", len(table))
    start, end = tree.start[nodes], np.maximum(tree.end[nodes], tree.start[nodes])
    assert overlaps(table["thread"], table["depth"], start, end) == 0
    last = [table.end()[table["thread"] == thread].max() for thread in table["thread"]]
    assert ((end <= table.end()) | (table.end() == last)).all()
