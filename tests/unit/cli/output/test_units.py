"""Values as people read them."""

import math
from typing import Any

import pytest
from kinetoctl.output.console import captured
from kinetoctl.output.result_tables import _Shown, _table, answers_first, fit
from kinetoctl.output.units import heading, headings, human, source_file


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


def test_columns_that_do_not_fit_a_terminal_are_left_out_from_the_right() -> None:
    name = _Shown("NAME", ["x" * 200], False)
    numbers = [_Shown(f"COLUMN{place}", ["1"], True) for place in range(9)]
    chosen, text_width = fit([name, *numbers], 80)
    assert [column.title for column in chosen] == ["NAME", *(f"COLUMN{place}" for place in range(4))]  # 36 + 4 * 9 = 72
    assert sum(column.width(text_width) + 2 for column in chosen) - 2 <= 80


def test_in_a_narrow_terminal_function_and_line_stay_and_the_meaning_goes() -> None:
    numbers = [_Shown(name, ["100.0%"], True) for name in ("SHARE %", "STEP")]
    meaning, what, cause = (
        _Shown("MEANING", ["m" * 60], False),
        _Shown("WHAT", ["w" * 60], False),
        _Shown("CAUSE", ["data"], False),
    )
    columns = [*numbers, meaning, what, _Shown("TOTAL", ["1 ms"], True), cause]
    assert [column.title for column in fit(columns, 80)[0]] == ["SHARE %", "STEP", "MEANING"]
    narrow = [column.title for column in fit(answers_first(columns), 80)[0]]
    assert narrow == ["SHARE %", "STEP", "WHAT", "CAUSE", "TOTAL"]
    assert answers_first(numbers) == numbers


def test_texts_take_the_width_that_is_left() -> None:
    name = _Shown("NAME", ["x" * 200], False)
    chosen, text_width = fit([name, _Shown("CALLS", ["1"], True)], 80)
    assert len(chosen) == 2
    assert text_width == 80 - 5 - 2


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", "torch/nn/modules/linear.py"),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", "yaml/__init__.py"),
        ("/usr/lib/python3.12/threading.py", "threading.py"),
        ("/home/ada/train.py", "train.py"),
        ("/home/ada/data/__init__.py", "data/__init__.py"),
        ("__init__.py", "__init__.py"),
        ("<string>", "<string>"),
    ],
)
def test_files_of_packages_are_named_from_the_package_on_and_others_by_their_name(path: str, text: str) -> None:
    assert source_file(path) == text
