"""Tables of results as texts."""

from typing import Any

import pytest
from kineto_trace.html.documents import place, table_columns, titles, tree_levels
from kineto_trace.view_api.result_columns import columns


def shown(kind: str, unit: str, values: list[Any], name: str = "x") -> tuple[str, list[str]]:
    (column,) = columns((name, kind, unit, "a thing"))  # type: ignore[arg-type]
    document = {"view": "v", "columns": [column._asdict()], "rows": [{name: value} for value in values]}
    (found,) = table_columns(document)
    return found.unit, list(found.texts)


@pytest.mark.parametrize(
    ("kind", "unit", "values", "expected"),
    [
        ("float", "us", [19900.0, 55.0, None, 0.4], ("ms", ["19.90", "0.06", "", "<0.01"])),
        ("int", "bytes", [3 << 20, 512 << 10], ("MiB", ["3.000", "0.500"])),
        ("float", "%", [69.88, 0.0, 0.01], ("%", ["69.9", "0.0", "<0.1"])),
        ("int", "", [1234567, 8], ("", ["1,234,567", "8"])),
        ("float", "GB/s", [281.25, 2.0], ("GB/s", ["281.2", "2.0"])),
        ("float", "", [float("nan"), 1.0], ("", ["nan", "1"])),
        ("float", "Hz", [1.98e9, 3.45e8], ("GHz", ["1.980", "0.345"])),
        ("bool", "", [True, None], ("", ["yes", ""])),
        ("texts", "", [["a", "b"]], ("", ["a, b"])),
        ("text", "", ["a\u202eb"], ("", [r"a\u202eb"])),
    ],
)
def test_a_column_has_one_unit_and_aligned_decimals(
    kind: str, unit: str, values: list[Any], expected: tuple[str, list[str]]
) -> None:
    assert shown(kind, unit, values) == expected


def test_values_of_rows_with_units_of_their_own_have_their_own_digits() -> None:
    schema = columns(("unit", "text", "", ""), ("value", "float", "", ""), ("calls", "int", "", ""))
    rows = [("Hz", 1_904_897_443.2, 5), ("%", 0.0542, 12345), (None, 0.095, 1), ("W", None, 1), ("W", float("nan"), 1)]
    document = {
        "view": "kernel_counters",
        "columns": [column._asdict() for column in schema],
        "rows": [dict(zip(("unit", "value", "calls"), row, strict=True)) for row in rows],
    }
    found = {column.name: column.texts for column in table_columns(document)}
    assert found["value"] == ["1,904,897,443", "0.0542", "0.095", "", "nan"]
    assert found["calls"] == ["5", "12,345", "1", "1", "1"]


def of_tree(view: str, depths: list[int]) -> dict[str, Any]:
    schema = columns(("path", "text", "", ""), ("name", "text", "", ""), ("depth", "int", "", ""))
    rows = [{"path": f"p{n}", "name": f"n{n}", "depth": depth} for n, depth in enumerate(depths)]
    return {"view": view, "columns": [column._asdict() for column in schema], "rows": rows}


def test_a_tree_has_the_level_of_each_row_and_one_column_instead_of_path_and_depth() -> None:
    document = of_tree("modules", [0, 1, 2, 1, 0])
    assert tree_levels(document) == [0, 1, 2, 1, 0]
    assert [(column.name, column.kind) for column in table_columns(document)] == [("name", "branch")]


@pytest.mark.parametrize(
    ("view", "depths"), [("modules", [1, 2]), ("modules", [0, 2]), ("modules", [0, 0]), ("query", [0, 1])]
)
def test_rows_that_are_not_below_one_another_are_no_tree(view: str, depths: list[int]) -> None:
    document = of_tree(view, depths)
    assert tree_levels(document) == []
    assert [column.name for column in table_columns(document)] == ["path", "name", "depth"]


def test_columns_without_a_value_and_those_that_are_left_out_are_not_shown() -> None:
    made = [
        column._asdict() for column in columns(("rank", "int", "", ""), ("a", "text", "", ""), ("b", "text", "", ""))
    ]
    document = {"view": "v", "columns": made, "rows": [{"rank": 0, "a": None, "b": "x"}]}
    assert [column.name for column in table_columns(document, ("rank",))] == ["b"]


def test_titles_are_words_and_no_two_are_alike() -> None:
    made = columns(
        ("gpu_us", "float", "us", ""), ("gpu", "text", "", ""), ("wait_pct", "float", "%", ""),
        ("wait_us", "float", "us", ""), ("busbw_gb_s", "float", "GB/s", ""), ("cpu_exec_pct", "float", "%", ""),
    )  # fmt: skip
    assert titles([column._asdict() for column in made]) == [
        "GPU time", "GPU", "Wait share", "Wait time", "Bus bandwidth", "CPU execution"
    ]  # fmt: skip


def test_a_place_in_source_code_is_short_with_its_path_in_the_title_and_escaped() -> None:
    assert place("f (/job/<b>/train.py:13)") == (
        '<span class="place" title="f (/job/&lt;b&gt;/train.py:13)">f (train.py:13)</span>'
    )
    assert place("aten::mm") == "aten::mm"
