"""What is shown of a result when its name is typed."""

from pathlib import Path

from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.open.trace_source import Source
from kineto_trace.view_api.result import Result, columns, make_result

SCHEMA = columns(
    ("name", "text", "", "a name"), ("time_us", "float", "us", "a time"), ("lost_bytes", "int", "bytes", "never there")
)
EVIL = "<script>alert('kernel')</script>\u202e"


def result(rows: int, name: str = "gemm", **changes: object) -> Result:
    values = {"name": [name] * rows, "time_us": [1500.0] * rows, "lost_bytes": [None] * rows}
    made = make_result("kernels", SCHEMA, values, ["a note"])
    return Result(made.view, made.columns, made.table, made.notes, str(changes.get("failure", "")))


def test_a_result_shows_its_size_and_its_first_rows() -> None:
    assert repr(result(7)).splitlines() == [
        "<Result kernels: 7 rows, 3 columns, 1 note>",
        "name    time",
        *["gemm  1.5 ms"] * 5,
        "… 2 more rows",
    ]
    assert repr(result(0)) == "<Result kernels: 0 rows, 3 columns, 1 note>"


def test_long_names_that_differ_do_so_as_they_are_shown() -> None:
    names = [f"void at::native::vectorized_elementwise_kernel<4, {name}Functor<float>, {'x' * 60}>" for name in "AB"]
    found = make_result("kernels", columns(("name", "text", "", "")), {"name": names})
    assert "AFunctor" in repr(found) and "BFunctor" in repr(found)
    assert "AFunctor" in found._repr_html_() and "BFunctor" in found._repr_html_()


def test_columns_that_do_not_fit_are_named() -> None:
    many = columns(*((f"column_{number}", "text", "", "") for number in range(40)))
    lines = repr(make_result("wide", many, {column.name: ["x" * 200] for column in many})).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[-1].startswith("… more columns: column_3, column_4")


def test_a_notebook_shows_twenty_rows_and_says_how_many_more_there_are() -> None:
    html = result(1234)._repr_html_()
    assert html.count("<tr") == 21
    assert "1,214 more rows" in html
    assert ">1.5 ms<" in html and ">note: a note<" in html
    assert "1 column without a value is left out" in html


def test_a_single_wide_row_is_a_list() -> None:
    many = columns(*((f"c{number}", "int", "", "") for number in range(30)))
    html = make_result("wide", many, {column.name: [7] for column in many})._repr_html_()
    assert html.count("<tr") == 30 and "<th" not in html


def test_no_value_of_a_result_is_markup() -> None:
    shown = result(2, EVIL, failure=EVIL)
    assert "<script" not in shown._repr_html_() and "&lt;script&gt;" in shown._repr_html_()
    assert "\u202e" not in shown._repr_html_() + repr(shown)
    evil = columns((EVIL, "texts", EVIL, EVIL))
    listed = make_result(EVIL, evil, {EVIL: [[EVIL] * 100]}, [EVIL])
    assert "<script" not in listed._repr_html_() and len(listed._repr_html_()) < 3000


def test_a_view_shows_its_options_and_columns() -> None:
    view = VIEWS["kernels"]
    assert repr(view).startswith("<View kernels: The kernels by name")
    html = view._repr_html_()
    assert all(f">{column.meaning}<" in html for column in view.result_columns if column.meaning.isalpha())
    assert max(len(repr(each)) for each in VIEWS.values()) < 300


def test_a_trace_that_is_not_open_shows_where_it_is() -> None:
    source = Source(path=Path("job/rank3.json.gz"), rank=3, left_out=("a", "b"))
    assert repr(source) == "<Source of rank 3: job/rank3.json.gz, 2 other captures of it left out>"
