"""Results of views: what they take, and how those of several ranks come together."""

import pickle
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns, make_result
from kineto_trace.view_api.view import VIEWS, Answer, Compat, View, view
from support.trace_files.traces import trace

SCHEMA = columns(("name", "text", "", "a name"), ("time_us", "float", "us", "a time"), ("calls", "int", "", "how many"))


@pytest.fixture
def plain() -> Iterator[View]:
    @view("a_plain_view", SCHEMA)
    def found(context: Context, *, least: int = 0) -> Answer:
        """One row per kernel."""
        table = context.trace.table("kernel")
        rows = np.flatnonzero(table["duration"] >= least)
        names = [context.trace.strings[number] for number in table["name"][rows].tolist()]
        return Answer({"name": names, "time_us": table["duration"][rows] / 1000, "calls": rows}, ["seen"])

    yield found
    del VIEWS["a_plain_view"]


def context(*durations: int, rank: int = 0) -> Context:
    return Context(trace({"kernel": [{"name": f"k{ns}", "duration": ns} for ns in durations]}), rank=rank)


def test_arrays_lists_and_arrow_give_the_same_result() -> None:
    by_list = make_result("v", SCHEMA, {"name": ["a", None], "time_us": [1.5, float("nan")], "calls": [1, None]})
    by_arrow = make_result(
        "v",
        SCHEMA,
        {
            "name": pa.array(["a", None]).dictionary_encode(),
            "time_us": np.array([1.5, np.nan]),
            "calls": pa.chunked_array([pa.array([1], pa.int32()), pa.array([None], pa.int32())]),
        },
    )
    assert (
        by_list.rows()
        == by_arrow.rows()
        == [
            {"name": "a", "time_us": 1.5, "calls": 1},
            {"name": None, "time_us": None, "calls": None},
        ]
    )
    assert by_arrow.table.schema.field("time_us").metadata == {b"unit": b"us", b"meaning": b"a time"}


def test_a_text_that_is_no_unicode_is_shown_with_marks() -> None:
    schema = columns(("name", "text", "", ""), ("stack", "texts", "", ""))
    found = make_result("v", schema, {"name": ["a\ud800", None], "stack": [["b\udfff"], None]})
    assert found.rows() == [
        {"name": "a\ufffd\ufffd\ufffd", "stack": ["b\ufffd\ufffd\ufffd"]},
        {"name": None, "stack": None},
    ]


def test_columns_that_do_not_follow_the_schema_are_refused() -> None:
    with pytest.raises(ValueError, match="calls"):
        make_result("v", SCHEMA, {"name": [], "time_us": []})


def test_results_of_ranks_come_in_the_order_of_ranks(plain: View) -> None:
    partials = [(3, plain.partial(context(5), least=1)), (1, plain.packed(plain.partial(context(7, 2), least=1)))]
    result = plain.combine(partials, least=1)
    assert [(row["rank"], row["name"], row["time_us"]) for row in result.rows()] == [
        (1, "k7", 0.007),
        (1, "k2", 0.002),
        (3, "k5", 0.005),
    ]
    assert result.notes == ("rank 1: seen", "rank 3: seen")


def test_a_contribution_travels_as_one_arrow_table(plain: View) -> None:
    packed = plain.packed(plain.partial(context(5)))
    assert plain.packed(packed) is packed
    assert plain.combine([(0, pickle.loads(pickle.dumps(packed)))]).values("name") == ["k5"]


def test_no_contribution_gives_an_empty_result(plain: View) -> None:
    result = plain.combine([])
    assert (len(result), result.table.column_names) == (0, ["rank", "name", "time_us", "calls"])


def test_one_trace_is_a_job_of_one_rank(plain: View) -> None:
    assert plain(context(5, rank=4)).rows() == [{"rank": 4, "name": "k5", "time_us": 0.005, "calls": 0}]
    with pytest.raises(ViewError, match="no option most; available: least"):
        plain(context(5), most=1)


def test_a_variant_gives_another_tools_figures_with_the_options_that_it_takes(plain: View) -> None:
    @plain.variant(Compat.HTA)
    def rounded(_: Context) -> Answer:
        """compat=hta: one row."""
        return Answer({"name": ["all"], "time_us": [1], "calls": [1]})

    assert plain.description == "One row per kernel.\n\ncompat=hta: one row."
    assert plain.compat == {Compat.HTA}
    assert plain(context(3, 9), compat=Compat.HTA, least=5).values("name") == ["all"]
    assert plain(context(3, 9), least=5).values("name") == ["k9"]
    with pytest.raises(ViewError, match="cannot reproduce the figures of plugin; it supports: hta"):
        plain(context(), compat=Compat.PLUGIN)


def test_a_variant_has_the_reduce_of_its_view_or_its_own(plain: View) -> None:
    counted = View("counted", lambda _: 1, SCHEMA[2:], lambda parts: Answer({"calls": [len(parts)]}))
    counted.variant(Compat.HTA)(lambda _: 2)
    counted.variant(Compat.PLUGIN, reduce=lambda parts: Answer({"calls": [parts[0][1]]}))(lambda _: 7)
    assert [counted(context(), compat=compat).values("calls") for compat in Compat] == [[1], [7], [1]]
