import struct
import time
from typing import Any

import numpy as np
import pytest
from kineto_agent.protocol.records import SPACE_PYTHON_CODE, SPACE_STACK_NODE, SPACE_THREAD_NAME, STACK_SAMPLE
from kineto_trace.decode import python_stacks
from kineto_trace.decode.decoded import Decoded, DecodeWindow
from kineto_trace.model.trace import NO_ROW, StringTable
from kineto_trace.spool.raw_records import Chunk, RawSource

TICK = 10_000_000  # ns, at 100 Hz
CODES = {1: b"a.py\x001\x00main", 2: b"a.py\x005\x00Step.run", 3: b"b.py\x009\x00load"}
NODES = {1: (0, 1), 2: (1, 2), 3: (1, 3), 4: (2, 3)}  # main, main>run, main>load, main>run>load


def source(samples: list[tuple[int, int, int]], nodes: dict[int, tuple[int, int]] = NODES, **changes: Any) -> RawSource:
    """samples: (tick, thread, node)."""
    data = b"".join(STACK_SAMPLE.pack(tick * TICK, thread, node, 0, 0) for tick, thread, node in samples)
    values: dict[str, Any] = {
        "source": "python_stacks",
        "format": "python_stacks/1",
        "metadata": {"hz": 100},
        "record_bytes": {},
        "records": len(samples),
        "dropped": 0,
        "data": memoryview(data),
        "chunks": (Chunk(sequence=0, records=len(samples), offset=0, size=len(data)),),
        "strings": {
            SPACE_PYTHON_CODE: CODES,
            SPACE_STACK_NODE: {key: struct.pack("<II", *value) for key, value in nodes.items()},
            SPACE_THREAD_NAME: {7: b"MainThread"},
        },
        "torn": 0,
    }
    return RawSource(**{**values, **changes})


def slices(samples: list[tuple[int, int, int]]) -> list[tuple[str, int, int, int, int]]:
    """(function, thread, start tick, duration in ticks, parent row)."""
    strings = StringTable()
    table = python_stacks.decode(source(samples), strings).tables["python_function"]
    return [
        (
            strings.strings[table["name"][row]],
            int(table["thread"][row]),
            int(table["start"][row]) // TICK,
            int(table["duration"][row]) // TICK,
            int(table["parent"][row]),
        )
        for row in range(len(table))
    ]


def test_samples_that_share_a_prefix_become_one_slice() -> None:
    assert slices([(1, 7, 1), (2, 7, 2), (3, 7, 2), (4, 7, 3), (5, 7, 1)]) == [
        ("a.py(1): main", 7, 1, 5, NO_ROW),
        ("a.py(5): Step.run", 7, 2, 2, 0),
        ("b.py(9): load", 7, 4, 1, 0),
    ]


def test_the_same_function_under_another_caller_is_another_slice() -> None:
    assert slices([(1, 7, 3), (2, 7, 4)]) == [
        ("a.py(1): main", 7, 1, 2, NO_ROW),
        ("b.py(9): load", 7, 1, 1, 0),
        ("a.py(5): Step.run", 7, 2, 1, 0),
        ("b.py(9): load", 7, 2, 1, 2),
    ]


def test_threads_are_apart() -> None:
    assert slices([(1, 8, 1), (1, 7, 1), (2, 7, 1), (2, 8, 1)]) == [
        ("a.py(1): main", 7, 1, 2, NO_ROW),
        ("a.py(1): main", 8, 1, 2, NO_ROW),
    ]


def test_a_thread_that_misses_two_ticks_has_ended_its_slices() -> None:
    samples = [(tick, 7, 1) for tick in range(1, 5)] + [(1, 8, 1), (4, 8, 1)]
    assert slices(samples) == [
        ("a.py(1): main", 7, 1, 4, NO_ROW),
        ("a.py(1): main", 8, 1, 1, NO_ROW),
        ("a.py(1): main", 8, 4, 1, NO_ROW),
    ]


def test_one_sample_that_could_not_be_taken_does_not_end_a_slice() -> None:
    assert slices([(1, 7, 1), (1, 8, 1), (2, 7, 1), (3, 7, 1), (3, 8, 1)])[1] == ("a.py(1): main", 8, 1, 3, NO_ROW)


def test_a_tick_that_nobody_saw_does_not_end_a_slice() -> None:
    assert slices([(1, 7, 1), (50, 7, 1)]) == [("a.py(1): main", 7, 1, 50, NO_ROW)]


def test_a_vanished_thread_ran_for_two_periods_at_most() -> None:
    assert slices([(1, 8, 1), (1, 7, 1), (9, 7, 1)])[1] == ("a.py(1): main", 8, 1, 2, NO_ROW)


def test_counts_samples_in_all_and_innermost() -> None:
    table = python_stacks.decode(source([(1, 7, 1), (2, 7, 2), (3, 7, 2)]), StringTable()).tables["python_function"]
    assert table["samples"].tolist() == [3, 2]
    assert table["self_samples"].tolist() == [1, 2]
    assert table["depth"].tolist() == [0, 1]


def test_samples_outside_the_window_are_counted() -> None:
    samples = source([(1, 7, 1), (2, 7, 1), (3, 7, 1), (4, 7, 1)])
    result = python_stacks.decode(samples, StringTable(), DecodeWindow(2 * TICK, 4 * TICK))
    assert (result.records, result.out_of_window, result.tables["python_function"]["samples"].tolist()) == (4, 2, [2])
    assert (result.sample_period_ns, result.threads) == (TICK, {7: "MainThread"})


def test_samples_of_unknown_stacks_and_cut_ones_are_counted() -> None:
    samples = source([(1, 7, 1), (2, 7, 99)])
    chunk = samples.chunks[0]
    torn = source(
        [(1, 7, 1), (2, 7, 99), (3, 7, 1)], chunks=(Chunk(sequence=0, records=3, offset=0, size=chunk.size + 5),)
    )
    assert python_stacks.decode(samples, StringTable()).undecoded == 1
    assert python_stacks.decode(torn, StringTable()).undecoded == 2


@pytest.mark.parametrize(
    "nodes",
    [
        {1: (1, 1)},
        {1: (2, 1), 2: (1, 1)},
        {1: (0, 77)},
        {number: (number - 1, 1) for number in range(1, 3000)},
    ],
)
def test_impossible_tries_are_not_believed(nodes: dict[int, tuple[int, int]]) -> None:
    result: Decoded = python_stacks.decode(source([(1, 7, max(nodes))], nodes), StringTable())
    assert (len(result.tables["python_function"]), result.undecoded) == (0, 1)


def test_no_samples_give_no_slices() -> None:
    assert len(python_stacks.decode(source([]), StringTable()).tables["python_function"]) == 0


def test_children_lie_in_their_parents_for_many_samples_quickly() -> None:
    random = np.random.default_rng(3)
    nodes = {number: (int(random.integers(max(0, number - 9), number)), number % 3 + 1) for number in range(1, 300)}
    walk = np.clip(np.cumsum(random.integers(-1, 2, 100_000)) % 299 + 1, 1, 299)
    samples = source([(row // 4, row % 4, int(node)) for row, node in enumerate(walk)], nodes)
    begin = time.process_time()
    table = python_stacks.decode(samples, StringTable()).tables["python_function"]
    assert time.process_time() - begin < 3  # 0.5 s on an idle machine
    nested = table["parent"] != NO_ROW
    parents = table.take(table["parent"][nested])
    assert (parents["start"] <= table["start"][nested]).all()
    assert (parents.end() >= table.end()[nested]).all()
    assert (parents["depth"] == table["depth"][nested] - 1).all()
    assert (parents["thread"] == table["thread"][nested]).all()
    assert table["self_samples"].sum() == 100_000
