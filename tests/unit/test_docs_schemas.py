"""docs/record-schemas.md is what the code says, and its example works."""

import importlib.util
import re
from pathlib import Path

import pytest
from kineto_agent.protocol.schema import CLOCKS, FRAMINGS, TRACKS, Activity, Col, Record, Schema, Texts
from kineto_trace.decode.declared_records import decode_records
from kineto_trace.model.trace import StringTable
from support.trace_files.declared import BASE, packed, source_of

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "record-schemas.md").read_text()


def test_the_reference_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate_schemas", DOCS / "generate_schemas.py")
    assert spec and spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.with_reference(TEXT) == TEXT, "run `python docs/generate_schemas.py`"


@pytest.mark.parametrize(
    ("kind", "head"),
    [(Schema, "member"), (Activity, "member of `Activity`"), (Col, "member of `Col`"), (Record, "member of `Record`"),
     (Texts, "member of `Texts`")],
)  # fmt: skip
def test_every_member_is_described(kind: type[Schema], head: str) -> None:
    table = TEXT.partition(f"| {head} | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    described = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(described) == sorted(kind._fields)


def test_every_framing_clock_and_track_is_described() -> None:
    for name in (*FRAMINGS, *CLOCKS, *TRACKS):
        assert f"`{name}`" in TEXT


def test_the_example_is_a_schema_that_decodes() -> None:
    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(code) == 1
    names: dict[str, Schema] = {}
    exec(code[0], names)
    schema = names["SCHEMA"]
    raw = bytearray(packed(schema, 3, start=BASE, end=BASE + 5, reason=1, queue=7))
    raw[0] = 3  # the kind
    strings = StringTable()
    found = decode_records(source_of(schema, [bytes(raw)]), schema, strings)
    assert found.tables["npu_wait"]["duration"].tolist() == [5]
    assert strings.strings == ["wait", "a fence"]
