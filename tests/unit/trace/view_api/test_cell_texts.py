import pytest
from kineto_trace.view_api.cell_texts import cell, heading, headings, unit
from kineto_trace.view_api.result import columns


@pytest.mark.parametrize(
    ("kind", "measured", "shown"),
    [
        ("float", "us", "time in µs, ms or s"),
        ("int", "bytes", "B, KiB, MiB or GiB"),
        ("float", "GB/s", "GB/s"),
        ("int", "", "number without a unit"),
        ("text", "", "text"),
    ],
)
def test_units_are_those_that_the_page_shows(kind: str, measured: str, shown: str) -> None:
    (column,) = columns(("x", kind, measured, "a thing"))  # type: ignore[arg-type]
    assert unit(column) == shown


@pytest.mark.parametrize(
    ("value", "kind", "measured", "shown"),
    [
        (1234.5, "float", "us", "1.23 ms"),
        (0.5, "float", "us", "500 ns"),
        (2.5e6, "float", "us", "2.5 s"),
        (3 << 20, "int", "bytes", "3 MiB"),
        (12.34, "float", "%", "12.3 %"),
        (1234567, "int", "", "1,234,567"),
        (True, "bool", "", "yes"),
        (None, "float", "us", ""),
        (["a", "b"], "texts", "", "a, b"),
        ([1, 2], "ints", "", "1, 2"),
        (["x"] * 100, "texts", "", f"{'x, ' * 12}x,…{' x,' * 8} …"),
    ],
)
def test_values_are_shown_with_units(value: object, kind: str, measured: str, shown: str) -> None:
    (column,) = columns(("x", kind, measured, "a thing"))  # type: ignore[arg-type]
    assert cell(value, column) == shown


def test_no_two_headings_of_a_table_are_alike() -> None:
    schema = columns(("op", "text", "", ""), ("op_us", "float", "us", ""), ("time_us", "float", "us", ""))
    assert headings(schema) == {"op": "operator", "op_us": "operator time", "time_us": "time"}
    schema = columns(("total_us", "float", "us", ""), ("total_bytes", "int", "bytes", ""))
    assert list(headings(schema).values()) == ["total time", "total size"]


def test_headings_have_no_units() -> None:
    names = ["total_us", "share_pct", "peak_memory_bytes", "name"]
    assert [heading(columns((name, "float", "", ""))[0]) for name in names] == [
        "total", "share %", "peak memory", "name"
    ]  # fmt: skip
