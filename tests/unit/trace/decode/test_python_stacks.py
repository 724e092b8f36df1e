"""What samples of format 2 say beside the slices: lines, states, threads; and what broken ones may not do."""

import struct
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_agent.protocol.records import (
    SPACE_PYTHON_CODE,
    SPACE_STACK_NODE,
    SPACE_THREAD_NAME,
    STACK_SAMPLE,
    WAIT_CHILD,
    WAIT_COLLECTOR,
    WAIT_CPU,
    WAIT_DRIVER,
    WAIT_IO,
    WAIT_LOCK,
    WAIT_MEMORY,
    WAIT_POLL,
    WAIT_SLEEP,
)
from kineto_trace.decode import python_stacks
from kineto_trace.decode.decoded import Decoded, DecodeWindow
from kineto_trace.model.line_counts import WAITS, LineCount, format_lines, parse_lines
from kineto_trace.model.trace import NO_ROW, StringTable
from kineto_trace.spool.raw_records import Chunk, RawSource
from support.agent.stack_records import (
    HAS_GIL,
    IDLE,
    PERIOD_NS,
    RUNNING,
    UNKNOWN,
    WAITING,
    Sample,
    code,
    linetable,
    node,
    recording,
)

CODES = {
    1: code(10, "t.py", "train", kind=10, table=linetable(11, 12, 13, first_line=10)),
    2: code(30, "t.py", "Loss.__call__", kind=10, table=linetable(31, 32, first_line=30)),
}
# train at its lines 11, 12 and 13; below line 12 a call at 31 and 32
NODES = {1: node(0, 1, 0), 2: node(0, 1, 2), 3: node(0, 1, 4), 4: node(2, 2, 0), 5: node(2, 2, 2), 6: node(0, 1)}


def decoded(*samples: tuple[int, ...]) -> tuple[Decoded, list[str]]:
    """samples: (node, state, CPU time in us, thread) at one tick after the other."""
    strings = StringTable()
    taken = []
    for tick, (number, *rest) in enumerate(samples, start=1):
        state, cpu_us, thread = (*rest, *(RUNNING, 0, 7)[len(rest) :])
        taken.append(Sample(tick * PERIOD_NS, thread, number, state, cpu_us))
    result = python_stacks.decode(
        recording(taken, codes=CODES, nodes=NODES, threads={7: b"MainThread", 9: b"pool-1"}), strings
    )
    return result, [
        strings.strings[number] if number >= 0 else "" for number in result.tables["python_function"]["lines"].tolist()
    ]


def test_a_long_function_is_one_slice_that_knows_how_often_each_line_ran() -> None:
    result, lines = decoded((1,), (2,), (2,), (3,), (1,), (2,))
    assert result.tables["python_function"]["samples"].tolist() == [6]
    assert result.tables["python_function"]["line"].tolist() == [12]
    assert lines == ["12: 3 running; 11: 2 running; 13: 1 running"]


def test_a_caller_has_the_line_of_the_call_and_no_lines_of_its_own() -> None:
    result, lines = decoded((4,), (5,), (5,))
    assert result.tables["python_function"]["line"].tolist() == [12, 32]
    assert result.tables["python_function"]["self_samples"].tolist() == [0, 3]
    assert lines == ["", "32: 2 running; 31: 1 running"]


def test_calls_at_two_lines_of_a_caller_are_two_slices_that_know_their_line() -> None:
    nodes = {**NODES, 7: node(1, 2, 0)}  # the same function as node 4, called at line 11
    samples = [Sample(tick * PERIOD_NS, 7, number) for tick, number in enumerate((7, 7, 4, 4, 4), start=1)]
    table = python_stacks.decode(recording(samples, codes=CODES, nodes=nodes), StringTable()).tables["python_function"]
    assert table["samples"].tolist() == [5, 2, 3]
    assert table["call_line"].tolist() == [0, 11, 12]
    assert table["parent"].tolist() == [-1, 0, 0]
    assert table["line"].tolist() == [12, 31, 31]


def test_idle_samples_say_what_they_waited_for() -> None:
    waits = (WAIT_SLEEP, WAIT_LOCK, WAIT_LOCK, WAIT_POLL, WAIT_IO, WAIT_CHILD, WAIT_DRIVER, WAIT_MEMORY, 77)
    table = decoded(
        *((1, IDLE | wait << 16) for wait in waits),
        (1, RUNNING | WAIT_CPU << 16),
        (1, RUNNING | WAIT_COLLECTOR << 16),
        (1, RUNNING | WAIT_SLEEP << 16),  # cannot be
        (1, IDLE | WAIT_CPU << 16),  # nor this
    )[0].tables["python_function"]
    assert {name: int(table[name][0]) for name in ("running", "idle", *WAITS[1:])} == {
        "running": 3, "idle": 10, "idle_sleep": 1, "idle_lock": 2, "idle_poll": 1, "idle_io": 1, "idle_child": 1,
        "idle_driver": 1, "idle_memory": 1, "ready": 1,
        "collecting": 1,
    }  # fmt: skip


def test_who_held_the_gil_while_a_slice_waited_is_told() -> None:
    def tick(number: int, *states: int) -> list[Sample]:
        nodes = (1, 4, 1, 1)
        threads = enumerate(zip(nodes, states, strict=False), start=7)
        return [Sample(number * PERIOD_NS, thread, at, state) for thread, (at, state) in threads]

    held, waits = RUNNING | HAS_GIL, WAITING
    samples = [
        *tick(1, waits, held, RUNNING),
        *tick(2, waits, RUNNING, held),
        *tick(3, waits, held, RUNNING),
        *tick(4, waits, held, held),  # of two interpreters
        *tick(5, waits, RUNNING, RUNNING),  # nobody was seen to hold it
    ]
    table = python_stacks.decode(recording(samples, codes=CODES, nodes=NODES), StringTable()).tables["python_function"]
    assert {int(thread): int(held) for thread, held in zip(table["thread"], table["gil_holder"], strict=True)} == {
        7: 8, 8: 0, 9: 0,
    }  # fmt: skip


def test_a_frame_that_has_not_begun_has_the_functions_first_line() -> None:
    assert decoded((6,))[0].tables["python_function"]["line"].tolist() == [10]


def test_self_samples_are_told_by_state() -> None:
    result, lines = decoded((1, RUNNING), (1, WAITING | HAS_GIL), (1, IDLE), (1, IDLE), (1, UNKNOWN), (1, 77))
    table = result.tables["python_function"]
    assert [table[name].tolist() for name in ("self_samples", "running", "waiting", "idle")] == [[6], [1], [1], [2]]
    assert lines == ["11: 1 running, 1 waiting, 2 idle, 2"]


def test_a_thread_without_python_is_no_function_but_has_its_cpu_time_and_name() -> None:
    result, _ = decoded((0, RUNNING, 9_000, 9), (1, RUNNING | HAS_GIL, 8_000), (0, RUNNING, 10_000, 9))
    assert (len(result.tables["python_function"]), result.undecoded) == (1, 0)
    assert result.threads == {7: "MainThread", 9: "pool-1"}
    shown = ("thread", "samples", "python", "running", "has_gil", "cpu_ns")
    assert [tuple(use[name] for name in shown) for use in result.thread_use] == [
        (9, 2, 0, 2, 0, 19_000_000),
        (7, 1, 1, 1, 1, 8_000_000),
    ]


def test_a_thread_that_leaves_python_ends_its_slices() -> None:
    table = decoded((1,), (0,), (1,))[0].tables["python_function"]
    assert (table["start"] // PERIOD_NS).tolist() == [1, 3]
    assert (table["duration"] // PERIOD_NS).tolist() == [1, 1]


def test_two_functions_of_one_line_that_call_each_other_stay_apart() -> None:
    codes = {1: code(1, "x.py", "<lambda>"), 2: code(1, "x.py", "g")}
    nodes = {1: node(0, 1), 2: node(1, 2), 3: node(2, 1)}
    table = python_stacks.decode(
        recording([Sample(1, 7, 3), Sample(2, 7, 3)], codes=codes, nodes=nodes), StringTable()
    ).tables["python_function"]
    assert (table["depth"].tolist(), table["samples"].tolist()) == ([0, 1, 2], [2, 2, 2])


def test_lines_are_written_and_read_alike() -> None:
    lines = [LineCount(43, (2, 12, 0, 3)), LineCount(7, (0, 0, 4, 0))]
    assert format_lines(lines) == "43: 12 running, 3 idle, 2; 7: 4 waiting"
    assert parse_lines(format_lines(lines)) == lines
    assert parse_lines("; x: 3, 4: ; 99999999999: 1; 5: 6 often, 2 idle") == [LineCount(5, (6, 0, 0, 2))]


@pytest.mark.parametrize(
    "raw",
    [b"", b"\1" * 12, struct.pack("<IBII", 1, 11, 2**32 - 1, 1) + b"ab", struct.pack("<IBII", 1, 11, 1, 2) + b"ab"],
)
def test_a_cut_code_object_makes_its_samples_unreadable(raw: bytes) -> None:
    result = python_stacks.decode(recording([Sample(1, 7, 1)], codes={1: raw}, nodes={1: node(0, 1)}), StringTable())
    assert (len(result.tables["python_function"]), result.undecoded) == (0, 1)


def test_an_impossible_first_line_is_no_line() -> None:
    codes = {1: code(2**32 - 1, "x.py", "f", kind=11, table=b"\xff" * 9)}
    result = python_stacks.decode(recording([Sample(1, 7, 1)], codes=codes, nodes={1: node(0, 1, 4)}), StringTable())
    assert result.tables["python_function"]["line"].tolist() == [0]


_numbers = st.integers(0, 6) | st.integers(0, 2**32 - 1)
_entries = st.dictionaries(st.integers(0, 8) | st.integers(0, 2**64 - 1), st.binary(max_size=40), max_size=8)


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), _numbers, _numbers, _numbers, _numbers)),
    st.dictionaries(_numbers, st.builds(node, _numbers, _numbers, st.integers(-(2**31), 2**31 - 1))) | _entries,
    st.dictionaries(_numbers, st.builds(code, _numbers, st.just("f"), st.just("g"), kind=st.integers(0, 12),
                                        table=st.binary(max_size=30))) | _entries,
    st.sampled_from(["python_stacks/1", "python_stacks/2"]),
    st.sampled_from([100, 0, -5, 10**12, "fast"]),
    st.integers(0, 40),
)  # fmt: skip
def test_no_records_whatever_break_the_decoder(
    samples: list[tuple[int, ...]],
    nodes: dict[int, bytes],
    codes: dict[int, bytes],
    format: str,
    hz: object,
    more_bytes: int,
) -> None:
    data = b"".join(STACK_SAMPLE.pack(*sample) for sample in samples) + bytes(more_bytes)
    source = recording(
        [],
        codes={},
        nodes={},
        format=format,
        metadata={"hz": hz},
        data=memoryview(data),
        chunks=(Chunk(sequence=0, records=1, offset=0, size=len(data)),),
        strings={SPACE_PYTHON_CODE: codes, SPACE_STACK_NODE: nodes, SPACE_THREAD_NAME: {2**63: b"\xff"}},
    )
    result = python_stacks.decode(source, StringTable())
    assert result.tables["python_function"]["self_samples"].sum() <= result.records - result.undecoded + (
        more_bytes % 24 > 0
    )
    assert (result.tables["python_function"]["duration"] >= 0).all()


# ------------------------------------------------------------ slices, of samples of format 1

# main, main > run, main > load, main > run > load
OLD_CODES = {1: b"a.py\x001\x00main", 2: b"a.py\x005\x00Step.run", 3: b"b.py\x009\x00load"}
OLD_NODES = {1: (0, 1), 2: (1, 2), 3: (1, 3), 4: (2, 3)}


def source(
    samples: list[tuple[int, int, int]], nodes: dict[int, tuple[int, int]] = OLD_NODES, **changes: Any
) -> RawSource:
    """samples: (tick, thread, node)."""
    return recording(
        [Sample(tick * PERIOD_NS, thread, number, state=UNKNOWN) for tick, thread, number in samples],
        codes=OLD_CODES,
        nodes={number: struct.pack("<II", *parent_and_code) for number, parent_and_code in nodes.items()},
        **{"format": "python_stacks/1", **changes},
    )


def slices(samples: list[tuple[int, int, int]]) -> list[tuple[str, int, int, int, int]]:
    """(function, thread, start tick, duration in ticks, parent row)."""
    strings = StringTable()
    table = python_stacks.decode(source(samples), strings).tables["python_function"]
    times = ((table[name] // PERIOD_NS).tolist() for name in ("start", "duration"))
    names = [strings.strings[number] for number in table["name"].tolist()]
    return list(zip(names, table["thread"].tolist(), *times, table["parent"].tolist(), strict=True))


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


@pytest.mark.parametrize(
    ("ticks", "others", "spans"),
    [
        ([1, 2], [1, 2], [(1, 2)]),
        ([1, 4], [1, 2, 3, 4], [(1, 1), (4, 1)]),
        ([1, 3], [1, 2, 3], [(1, 3)]),
        ([1, 50], [], [(1, 50)]),
        ([1], [1, 9], [(1, 2)]),
    ],
    ids=["apart", "missed two ticks", "missed one", "a gap that nobody saw", "vanished: two periods at most"],
)
def test_a_slice_lasts_until_its_thread_misses_two_ticks_that_others_were_seen_at(
    ticks: list[int], others: list[int], spans: list[tuple[int, int]]
) -> None:
    found = slices([(tick, 8, 1) for tick in ticks] + [(tick, 7, 1) for tick in others])
    assert [row for row in found if row[1] == 8] == [("a.py(1): main", 8, *span, NO_ROW) for span in spans]


def test_counts_samples_in_all_and_innermost() -> None:
    table = python_stacks.decode(source([(1, 7, 1), (2, 7, 2), (3, 7, 2)]), StringTable()).tables["python_function"]
    assert table["samples"].tolist() == [3, 2]
    assert table["self_samples"].tolist() == [1, 2]
    assert table["depth"].tolist() == [0, 1]


def test_samples_outside_the_window_are_counted() -> None:
    samples = source([(1, 7, 1), (2, 7, 1), (3, 7, 1), (4, 7, 1)])
    result = python_stacks.decode(samples, StringTable(), DecodeWindow(2 * PERIOD_NS, 4 * PERIOD_NS))
    assert (result.records, result.out_of_window, result.tables["python_function"]["samples"].tolist()) == (4, 2, [2])
    assert (result.sample_period_ns, result.threads) == (PERIOD_NS, {7: "MainThread"})


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
