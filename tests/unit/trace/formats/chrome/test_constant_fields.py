from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.arrays.codec import END, OPTIONAL, SIGNED, TEXT, UNSIGNED, Field, MixedWriter, PreparedTexts
from kineto_trace.formats.chrome.constant_fields import folded

NAMES = PreparedTexts([b'"a"', b"", b'"ccc"'])
TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def column(kind: str, *values: int) -> npt.NDArray[Any]:
    return np.array(values, np.int64).astype(kind)


def text(fields: list[Field], rows: list[int]) -> bytes:
    out = np.empty(1 << 16, np.uint8)
    form, row = np.zeros(len(rows), np.uint32), np.array(rows, np.uint32)
    done, size = MixedWriter([fields], form, row).write(out, 0, len(rows))
    assert done == len(rows)
    return out[:size].tobytes()


def test_values_that_do_not_vary_join_the_literals() -> None:
    fields = [
        Field(b'{"cat":', TEXT, column("int32", 2, 2), NAMES),
        Field(b',"pid":', SIGNED, column("int64", -4, -4)),
        Field(b',"tid":', SIGNED, column("int64", 5, 6)),
        Field(b',"device":', UNSIGNED, column("uint8", 0, 0)),
        Field(b"}"),
    ]
    found = folded(fields)
    assert [(field.literal, field.operation) for field in found] == [
        (b'{"cat":"ccc","pid":-4,"tid":', SIGNED),
        (b',"device":0}', END),
    ]
    assert text(found, [1, 0]) == text(fields, [1, 0])


def test_only_the_rows_that_are_written_count() -> None:
    fields = [Field(b"x", SIGNED, column("int64", 1, 2, 1)), Field(b"\n")]
    assert [field.literal for field in folded(fields, np.array([0, 2]))] == [b"x1\n"]
    assert len(folded(fields, np.array([0, 1]))) == 2
    assert len(folded(fields, np.array([], np.int64))) == 2


def test_what_may_be_left_out_stays_a_field() -> None:
    fields = [Field(b"x", OPTIONAL, column("int64", 7, 7), base=7), Field(b"\n")]
    assert len(folded(fields)) == 2


@given(st.data())
def test_the_text_is_the_same(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 5))
    fields = []
    for _ in range(data.draw(st.integers(0, 4))):
        operation = data.draw(st.sampled_from([SIGNED, UNSIGNED, TEXT]))
        numbers = st.integers(-1, 3) if operation == TEXT else st.sampled_from([0, 1, -1, -(2**63), 2**63 - 1])
        values = data.draw(st.lists(numbers, min_size=length, max_size=length))
        if data.draw(st.booleans()):
            values = values[:1] * length
        kind = data.draw(st.sampled_from(TYPES if operation != TEXT else TYPES[4:6]))
        fields.append(Field(data.draw(st.binary(max_size=40)), operation, column(kind, *values), NAMES))
    fields.append(Field(b"\n"))
    rows = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    assert text(folded(fields), rows) == text(fields, rows)
    assert text(folded(fields, np.array(rows)), rows) == text(fields, rows)


@pytest.mark.parametrize("fields", [[], [Field(b"}")]])
def test_forms_without_values_stay(fields: list[Field]) -> None:
    assert folded(fields) == fields
