"""Line tables of real code objects of every CPython that is here, and of broken ones."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.decode.python_callees import LINETABLE, LNOTAB, LOCATIONS, line_table
from kineto_trace.model.line_counts import MAX_LINE
from support.machine.pythons import python

PROGRAM = Path(__file__).parents[3] / "support" / "agent" / "line_tables.py"
SOURCES = sorted(Path(json.__file__).parent.glob("*.py")) + [Path(subprocess.__file__)]


@pytest.mark.parametrize(
    "version", ["3.9", "3.10", "3.11", *(pytest.param(f"3.{minor}", marks=pytest.mark.slow) for minor in range(12, 16))]
)
def test_every_instruction_has_the_line_that_its_python_says(version: str) -> None:
    ran = subprocess.run([python(version), "-W", "ignore", PROGRAM, *SOURCES], capture_output=True, check=True)
    functions = json.loads(ran.stdout)
    assert len(functions) > 100
    for kind, first_line, raw, spans in functions:
        table = line_table(kind, first_line, bytes.fromhex(raw))
        wrong = [
            (offset, table.at(offset), line)
            for start, end, line in spans
            if line is not None
            for offset in range(start, end, 2)
            if table.at(offset) != (line or first_line)
        ]
        assert wrong == []


@pytest.mark.parametrize(
    ("kind", "raw", "lines"),
    [
        (LNOTAB, bytes([4, 1, 6, 2]), [10, 10, 11, 11, 11, 13]),  # the last one to the end of the code
        (LNOTAB, bytes([0, 5, 2, 256 - 3]), [15, 12, 12]),
        (LINETABLE, bytes([2, 0, 2, 128, 2, 256 - 1, 2, 3]), [10, 10, 9, 12, 10]),  # 128: no line; behind it: the first
        (LOCATIONS, bytes([0xF8, 0xE9, 4, 0, 0, 0, 0xD9, 0x42, 0, 0xD8, 0, 0]), [10, 12, 12, 13, 13, 14, 10]),
        (0, b"anything", [10]),
    ],
)
def test_small_tables_as_the_formats_say(kind: int, raw: bytes, lines: list[int]) -> None:
    table = line_table(kind, 10, raw)
    assert [table.at(2 * place) for place in range(len(lines))] == lines


@pytest.mark.parametrize("offset", [-1, 100, 2**31])
def test_an_offset_that_the_table_does_not_cover_has_the_first_line(offset: int) -> None:
    assert line_table(LINETABLE, 10, bytes([4, 5])).at(offset) == 10


@given(st.integers(0, 12), st.integers(0, 2**32 - 1), st.binary(max_size=200), st.integers(-(2**31), 2**31))
def test_any_bytes_give_some_line(kind: int, first_line: int, raw: bytes, offset: int) -> None:
    line = line_table(kind, first_line, raw).at(offset)
    assert line == first_line or 0 < line <= MAX_LINE


@pytest.mark.parametrize("kind", [LNOTAB, LINETABLE, LOCATIONS])
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7F, 0x80, 0xE8, 0xFF])
def test_a_long_table_takes_no_longer_than_its_bytes(kind: int, byte: int) -> None:
    begin = time.process_time()
    line_table(kind, 1, bytes([byte]) * 1_000_000)
    assert time.process_time() - begin < 5  # 0.4 s on an idle machine
