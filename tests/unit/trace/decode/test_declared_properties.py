"""Any schema that is declared, and any records by it, come out as they went in; anything else does no harm."""

import json
import struct
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kineto_agent.protocol.schema import (
    DTYPES,
    FRAMINGS,
    HEADED,
    SIZE_FIELD,
    TYPES_OF_KINETO,
    Activity,
    Col,
    Record,
    Schema,
    Texts,
    from_json,
    to_json,
    width,
)
from kineto_trace.decode.declared_records import LATEST_NS, decode, line_of
from kineto_trace.decode.decoded import DecodeWindow
from kineto_trace.decode.record_set import gather
from kineto_trace.model.trace import StringTable
from support.accelerators.npu import NPU
from support.trace_files.declared import BASE, framed, source_of, texts

WINDOW = DecodeWindow(BASE, BASE + 10**9)
CODES = {"i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "f64": "d"}
HEAD = {SIZE_FIELD: 12, HEADED: 0}  # bytes of a record that the framing takes


@st.composite
def schemas(draw: st.DrawFn) -> tuple[Schema, list[Col]]:
    """A schema with one own type of any columns, at any offsets."""
    framing = draw(st.sampled_from(FRAMINGS))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), max_size=8))
    columns = [
        Col(f"c{number}", dtype, "a column", texts=Texts(values={1: "one"}) if dtype == "text" else Texts())
        for number, dtype in enumerate(dtypes)
    ]
    at = HEAD.get(framing, 4)
    fields: dict[str, tuple[str, int]] = {}
    wanted = {"start": "Q", "end": "Q", **{column.name: CODES.get(column.dtype, "I") for column in columns}}
    for name, code in draw(st.permutations(list(wanted.items()))):
        at += draw(st.integers(0, 5))
        fields[name] = (code, at)
        at += width(code)
    record = Record(type="npu_any", size=at + draw(st.integers(0, 9)), fields=fields, texts=Texts(otherwise="any"))
    own = Activity(columns=tuple(columns), track=draw(st.sampled_from(["device", "thread"])), meaning="Anything.")
    kind = draw(st.integers(0, 1 << 20))
    schema = Schema(name="npu", types={"npu_any": own}, records={kind: record}, framing=framing)
    schema.check()
    return schema, columns


def _values(column: Col) -> st.SearchStrategy[Any]:
    if column.dtype == "text":
        return st.integers(0, 3)
    if column.dtype == "f64":
        return st.floats(allow_nan=False)
    bits = 8 * width(CODES[column.dtype])
    return (
        st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
        if column.dtype[0] == "i"
        else st.integers(0, (1 << bits) - 1)
    )


@given(st.data())
def test_every_value_of_every_record_comes_out(data: st.DataObject) -> None:
    schema, columns = data.draw(schemas())
    [(kind, record)] = schema.records.items()
    rows = data.draw(
        st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), *map(_values, columns)), max_size=6)
    )
    buffers = [b"", b""]
    for number, (start, length, *values) in enumerate(rows):
        raw = bytearray(record.size)
        named = dict(zip([column.name for column in columns], values, strict=True))
        for name, value in {"start": BASE + start, "end": BASE + start + length, **named}.items():
            code, offset = record.fields[name]
            struct.pack_into("<" + code, raw, offset, value)
        if schema.framing not in HEAD:
            struct.pack_into("<I", raw, 0, kind)
        buffers[number % 2] += framed(schema, kind, bytes(raw))
    strings = StringTable()
    found = decode(source_of(schema, buffers), strings, WINDOW)
    ordered = rows[::2] + rows[1::2]
    table = found.tables["npu_any"]
    assert (found.undecoded, found.warnings, found.records) == (0, (), len(rows))
    assert table["start"].tolist() == [BASE + row[0] for row in ordered]
    assert table["duration"].tolist() == [row[1] for row in ordered]
    for place, column in enumerate(columns, start=2):
        expected = [row[place] for row in ordered]
        if column.dtype == "text":
            said = {1: "one"}
            assert texts(strings.strings, table[column.name]) == [said.get(v, f"{column.name} {v}") for v in expected]
        else:
            assert table[column.name].tolist() == expected


@given(schemas())
def test_a_schema_survives_its_json_form(made: tuple[Schema, list[Col]]) -> None:
    schema, _ = made
    assert from_json(json.loads(json.dumps(to_json(schema)))) == schema


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=20),
       st.sampled_from(["types", "records", "name", "framing", "clock", "tick_ns"]))  # fmt: skip
def test_json_of_any_form_is_a_schema_or_a_value_error(value: Any, member: str) -> None:
    try:
        from_json({**to_json(NPU), member: value}).check()
    except ValueError as exc:
        assert str(exc)


@given(st.sampled_from(FRAMINGS), st.lists(st.binary(max_size=200), max_size=3), st.dictionaries(
    st.integers(0, 20), st.integers(0, 200), max_size=4))  # fmt: skip
def test_bytes_of_any_form_are_rows_or_counted(framing: str, buffers: list[bytes], seen: dict[int, int]) -> None:
    schema = NPU._replace(framing=framing)
    found = decode(source_of(schema, buffers, record_bytes=seen), StringTable(), WINDOW)
    rows = sum(len(table) for table in found.tables.values())
    assert rows <= found.records
    assert found.undecoded <= sum(map(len, buffers)) + len(buffers)
    assert bool(found.undecoded) <= bool(found.warnings)


@given(st.lists(st.tuples(st.integers(-5, 1 << 63), st.integers(-5, 1 << 63)), max_size=6),
       st.lists(st.integers(1, LATEST_NS), min_size=1, max_size=5), st.booleans())  # fmt: skip
def test_a_clock_of_any_samples_gives_times_in_order(
    pairs: list[tuple[int, int]], readings: list[int], free: bool
) -> None:
    line, _ = line_of(pairs, nominal_ns=1.0, free=free)
    if line is not None:
        times = line.to_unix(np.array(sorted(readings)))
        assert ((times >= 0) & (times <= LATEST_NS)).all()
        assert (np.diff(times) >= 0).all()


@given(st.binary(min_size=20, max_size=40), st.lists(st.integers(0, 10), max_size=5), st.sampled_from("bBhHiIqQfd"))
def test_fields_are_gathered_wherever_they_are(raw: bytes, begin: list[int], code: str) -> None:
    found = gather(np.frombuffer(raw, np.uint8), np.array(begin, np.int64), 2, np.dtype("<" + code))
    expected = [struct.unpack_from("<" + code, raw, at + 2)[0] for at in begin]
    np.testing.assert_array_equal(found, np.array(expected, np.dtype("<" + code)))


def test_every_type_of_kinetos_can_be_declared_with_all_its_columns() -> None:
    for kind, (roles, columns) in TYPES_OF_KINETO.items():
        fields = {"start": ("Q", 4), "end": ("Q", 12), **{role: ("I", 20 + 4 * n) for n, role in enumerate(roles)}}
        record = Record(type=kind, size=64, fields=fields, texts=Texts(otherwise="any"))
        record = record._replace(**{str(role): role for role in roles})  # type: ignore[arg-type]
        declared = Activity(tuple(Col(name) for name in columns))
        schema = Schema(name="npu", types={kind: declared}, records={1: record})
        assert from_json(to_json(schema)) == schema
