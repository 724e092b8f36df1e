"""What samples at calls say about the callee: the column callees of python_function."""

import dis
import platform
from typing import Any

import pytest
from kineto_agent.protocol.records import (
    LINES_310,
    LINES_311,
    PYTHON_BYTECODE,
    SPACE_PYTHON_BYTECODE,
    SPACE_PYTHON_CODE,
    SPACE_STACK_NODE,
)
from kineto_agent.sources.python.stack_sampling import opcode_table
from kineto_trace.decode import python_stacks
from kineto_trace.model.line_counts import CalleeCount, format_callees, parse_callees
from kineto_trace.model.trace import StringTable
from support.agent.stack_records import IDLE, PERIOD_NS, RUNNING, Sample, code, node, recording


def hand_over(state: Any, pickle: Any, zlib: Any) -> int:
    """Never runs: only its code is read."""
    data = pickle.dumps(state.tolist())
    return len(zlib.compress(data))


CODE = hand_over.__code__
CALLS = [each.offset for each in dis.get_instructions(CODE) if each.opname == "CALL"]  # tolist, dumps, compress, len
FIRST = CODE.co_firstlineno
BYTECODE = (
    PYTHON_BYTECODE.pack(len(CODE.co_code), sum(len(name) + 1 for name in CODE.co_names))
    + CODE.co_code
    + "".join(f"{name}\0" for name in (*CODE.co_names, *CODE.co_varnames)).encode()
)
METADATA = {"hz": 100, "python_version": platform.python_version(), "opcodes": opcode_table()}


def callees(
    *samples: tuple[int, int],
    kind: int = LINES_311,
    bytecode: bytes = BYTECODE,
    metadata: dict[str, Any] = METADATA,
    below: bool = False,
) -> list[str]:
    """The texts of the slices. samples: (number of the call, state). below: in a function that the call calls."""
    entry = code(FIRST, "t.py", "hand_over", kind=kind, table=CODE.co_linetable)
    nodes = {number + 1: node(0, 1, offset) for number, offset in enumerate(CALLS)}
    nodes |= {number + 11: node(number + 1, 2) for number in range(len(CALLS))}
    source = recording(
        [Sample(tick * PERIOD_NS, 7, at + (11 if below else 1), state) for tick, (at, state) in enumerate(samples, 1)],
        codes={1: entry, 2: code(1, "t.py", "f")},
        nodes=nodes,
        metadata=metadata,
        strings={
            SPACE_PYTHON_CODE: {1: entry, 2: code(1, "t.py", "f")},
            SPACE_STACK_NODE: nodes,
            SPACE_PYTHON_BYTECODE: {1: bytecode, 99: BYTECODE},
        },
    )
    strings = StringTable()
    found = python_stacks.decode(source, strings).tables["python_function"]["callees"].tolist()
    return [strings.strings[number] if number >= 0 else "" for number in found]


def test_a_slice_knows_what_its_lines_called_and_in_which_state() -> None:
    assert callees((0, RUNNING), (0, RUNNING), (1, RUNNING), (2, IDLE), (2, RUNNING), (2, RUNNING)) == [
        f"{FIRST + 3} zlib.compress: 2 running, 1 idle; {FIRST + 2} state.tolist: 2 running; "
        f"{FIRST + 2} pickle.dumps: 1 running"
    ]


def test_only_the_innermost_frame_has_a_callee() -> None:
    assert callees((0, RUNNING), (0, RUNNING), below=True) == ["", ""]


@pytest.mark.parametrize("without", ["python_version", "opcodes"])
def test_without_the_meaning_of_opcodes_there_are_no_callees(without: str) -> None:
    assert callees((0, RUNNING), metadata={**METADATA, without: None}) == [""]


def test_line_tables_without_columns_give_no_callees() -> None:
    assert callees((0, RUNNING), kind=LINES_310) == [""]


@pytest.mark.parametrize("size", [*range(0, len(BYTECODE), 7), len(BYTECODE) - 1])
def test_an_entry_that_is_cut_anywhere_gives_right_names_or_none(size: int) -> None:
    (text,) = callees((0, RUNNING), (3, RUNNING), bytecode=BYTECODE[:size])
    assert {entry.callee for entry in parse_callees(text)} <= {"state.tolist", ".tolist", "len"}


def test_callees_read_back_as_they_were_written() -> None:
    entries = [CalleeCount(7, ".join", (0, 0, 4, 0)), CalleeCount(43, "pickle.dumps", (2, 12, 0, 3))]
    assert format_callees(entries) == "43 pickle.dumps: 12 running, 3 idle, 2; 7 .join: 4 waiting"
    assert parse_callees(format_callees(entries)) == entries[::-1]


@pytest.mark.parametrize("text", ["", "43: 12 running", "x a: 1", "43 a b: 2", "99999999999 a: 1", "4 1a: 2", "4 a; 3"])
def test_a_text_of_another_form_has_no_callees(text: str) -> None:
    assert parse_callees(text) == []
