from typing import Any

import pytest
from kineto_trace.view_api.cell_texts import cell, confidence, gain, heading, headings, saving, unit
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
        (["x"] * 100, "texts", "", f"{'x, ' * 14}…{', x' * 6}, …"),
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


def test_a_place_in_source_code_is_shown_from_its_package_on_and_whole() -> None:
    (column,) = columns(("what", "text", "", "a thing"))
    place = (
        "LanguageModelTrainer.prepare_the_next_batch (/v/site-packages/transformers/models/llama/modeling_llama.py:7)"
    )
    assert cell(place, column) == place.replace("/v/site-packages/", "")


FINDING = {
    "rank": 3, "finding": "host_bound", "title": "The host is late", "saving_us": 72_000.0, "saving_pct": 71.7,
    "saving_per_step_us": 36_000.0, "uncertainty_pct": None, "guess": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("several", "changes", "text"),
    [
        (False, {}, "could save up to 36 ms a step (72 %, likely)"),
        (False, {"saving_per_step_us": None}, "could save up to 72 ms of the recorded time (72 %, likely)"),
        (
            False,
            {"guess": True, "uncertainty_pct": 4.26},
            "could save up to 36 ms a step (72 %, a rough estimate), ± 4.3 %",
        ),
        (False, {"uncertainty_pct": 0.04}, "could save up to 36 ms a step (72 %, measured)"),
        (True, {}, "could save up to 36 ms a step (72 %, likely), on rank 3"),
        (
            True,
            {"title": "The host is late (on 4 of 4 ranks)"},
            "could save up to 36 ms a step (72 %, likely), most on rank 3",
        ),
        (True, {"rank": None}, "could save up to 36 ms a step (72 %, likely)"),
        (True, {"saving_us": None, "guess": True}, "on rank 3"),
        (False, {"saving_us": None, "guess": True}, ""),
    ],
)
def test_a_finding_says_what_it_could_save_how_sure_that_is_and_on_which_rank(
    several: bool, changes: dict[str, Any], text: str
) -> None:
    assert gain({**FINDING, **changes}, several=several) == text


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({}, "measured"),
        ({"uncertainty_pct": 40.0}, "likely"),
        ({"uncertainty_pct": None}, "likely"),
        ({"finding": "no_tensor_cores"}, "likely"),
        ({"guess": True}, "a rough estimate"),
    ],
)
def test_only_a_saving_that_varies_little_and_assumes_nothing_is_measured(changed: dict[str, Any], word: str) -> None:
    row = {**FINDING, "uncertainty_pct": 2.0, **changed}
    assert (confidence(row), saving(row)) == (word, f"could save up to 36 ms a step (72 %, {word})")
