"""Values as people read them."""

import math
from typing import Any

import pytest
from kinetoctl.output.console import captured
from kinetoctl.output.result_tables import _Shown, _table
from kinetoctl.output.units import heading, headings, human


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "us", "500 ns"),
        (12.34, "us", "12.3 µs"),
        (1234.5, "us", "1.23 ms"),
        (2_500_000.0, "us", "2.5 s"),
        (90_000_000.0, "us", "1 min 30 s"),
        (-12.34, "us", "-12.3 µs"),
        (0.0, "us", "0 ns"),
        (12.345, "%", "12.3%"),
        (1536, "bytes", "1.5 KiB"),
        (-1536, "bytes", "-1.5 KiB"),
        (12345, "", "12,345"),
        (2**60, "", str(2**60)),
        (0.123456, "", "0.1235"),
        (12345.6, "GB/s", "12,345.6 GB/s"),
        (3.0, "", "3"),
        (True, "", "yes"),
        (None, "us", "-"),
        (math.nan, "us", "-"),
        ([1, 2], "", "1, 2"),
        ([], "", "-"),
        ("aten::mm", "", "aten::mm"),
        ("\x1b[31mred\x9b0m", "", "\\x1b[31mred\\x9b0m"),
    ],
)
def test_values_for_people(value: Any, unit: str, text: str) -> None:
    assert human(value, unit) == text


def test_cells_that_are_cut_still_differ() -> None:
    names = [f"void at::native::vectorized_elementwise_kernel<4, {name}Functor<float>, {'x' * 60}>" for name in "AB"]
    lines = captured(_table([_Shown("NAME", names, False)], 36))
    assert "AFunctor" in lines[1] and "BFunctor" in lines[2] and max(map(len, lines)) <= 38


def test_headings_leave_the_unit_to_the_values() -> None:
    assert [heading("device_total_us", "us"), heading("share_pct", "%"), heading("name")] == [
        "DEVICE TOTAL",
        "SHARE %",
        "NAME",
    ]


def test_no_two_headings_of_a_table_are_alike() -> None:
    assert headings([("op", ""), ("op_us", "us"), ("time_us", "us")]) == ["OP", "OP TIME", "TIME"]
    assert headings([("total_us", "us"), ("total_bytes", "bytes")]) == ["TOTAL TIME", "TOTAL SIZE"]
