"""Kineto's own traces of an H200, taken apart into columns and put together again by us."""

import io
import json
from collections import Counter
from typing import Any

import pytest
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import TextSink
from support.trace_files.h200 import recording
from support.trace_files.kinetos_columns import trace_of

Rows = list[dict[str, Any]]


@pytest.fixture(params=["mlp-cupti130001", "graph-cupti130001", "streams-cupti130001"], scope="module")
def both(request: pytest.FixtureRequest) -> tuple[Rows, Rows]:
    """Kineto's rows and ours."""
    document = recording(request.param).kineto
    file = io.BytesIO()
    with TextSink(file) as sink:
        write_chrome(trace_of(document), sink, trace_name="trace.json")
    return document["traceEvents"], json.loads(file.getvalue())["traceEvents"]


def of(rows: Rows, *categories: str) -> Rows:
    return [row for row in rows if row.get("cat") in categories]


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["cat"], row["name"], row["pid"], row["tid"], round(row["ts"] * 1000), round(row["dur"] * 1000))


@pytest.mark.parametrize("category", ["kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"])
def test_gpu_work_and_calls_belong_to_the_same_operators(both: tuple[Rows, Rows], category: str) -> None:
    def attributed(rows: Rows) -> Counter[Any]:
        ops = {row["args"]["External id"]: key_of(row) for row in of(rows, "cpu_op")}
        return Counter((key_of(row), ops.get(row["args"].get("External id"))) for row in of(rows, category))

    kinetos, ours = both
    assert attributed(ours) == attributed(kinetos)


def test_forward_and_backward_operators_are_linked_as_kineto_does(both: tuple[Rows, Rows]) -> None:
    def links(rows: Rows) -> Counter[Any]:
        ends: dict[int, dict[str, Any]] = {}
        for row in of(rows, "fwdbwd"):
            ends.setdefault(row["id"], {})[row["ph"]] = (row["tid"], row["ts"])
        return Counter((ends[number]["s"], ends[number]["f"]) for number in ends)

    kinetos, ours = both
    assert links(ours) == links(kinetos)


def test_operators_are_the_same_rows_with_the_same_arguments(both: tuple[Rows, Rows]) -> None:
    def rows_of(rows: Rows) -> Counter[Any]:
        numbers = ("External id", "Ev Idx")
        return Counter(
            (key_of(row), json.dumps({k: v for k, v in row["args"].items() if k not in numbers}, sort_keys=True))
            for row in of(rows, "cpu_op", "user_annotation")
        )

    kinetos, ours = both
    assert rows_of(ours) == rows_of(kinetos)


def test_annotations_have_the_same_gpu_work_inside(both: tuple[Rows, Rows]) -> None:
    kinetos, ours = ({key_of(row) for row in of(rows, "gpu_user_annotation")} for rows in both)
    assert ours >= kinetos  # ours also has those that enclose others
