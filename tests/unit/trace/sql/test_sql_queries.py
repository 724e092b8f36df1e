"""Queries: analyses as tables, errors, and what SQL may not do."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb
import pytest
from kineto_trace.errors import QueryError, ViewError
from kineto_trace.model.context import Context
from kineto_trace.sql import Database
from kineto_trace.sql.arrow_tables import SqlSource
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import VIEWS, Answer, View
from support.trace_files.traces import trace

calls: list[str] = []


def _longest(context: Context) -> Answer:
    """The longest kernel."""
    calls.append("longest")
    longest = int(context.trace.table("kernel")["duration"].max())
    return Answer({"longest_us": [longest / 1000]}, ["one was left out"])


def _count(context: Context) -> int:
    """Kernels of all ranks."""
    return len(context.trace.table("kernel"))


def _refused(_context: Context) -> Answer:
    """Never works."""
    raise ViewError("there is nothing to see")


LONGEST = columns(("longest_us", "float", "us", "time"))
EXAMPLES: Mapping[str, View] = {
    "example_longest": View("example_longest", _longest, LONGEST, None),
    "example_count": View(
        "example_count",
        _count,
        columns(("kernels", "int", "", "of all ranks")),
        lambda partials: Answer({"kernels": [sum(part for _, part in partials)]}),
    ),
    "example_refused": View("example_refused", _refused, LONGEST, None),
}


@pytest.fixture(scope="module")
def opened() -> Iterator[Database]:
    sources = [
        SqlSource("a", Context(trace({"kernel": [{"name": "k", "duration": 2000}]}))),
        SqlSource("b", Context(trace({"kernel": [{"name": "k", "duration": 5000}]}), rank=1)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, view in EXAMPLES.items():
            patch.setitem(VIEWS, name, view)
        with Database(sources) as database:
            yield database


@pytest.fixture
def database(opened: Database) -> Database:
    calls.clear()
    return opened


def test_a_view_is_a_table_with_rank_and_trace(database: Database) -> None:
    result = database.query("SELECT * FROM example_longest ORDER BY longest_us DESC")
    assert result.rows() == [
        {"rank": 1, "trace": "b", "longest_us": 5.0},
        {"rank": 0, "trace": "a", "longest_us": 2.0},
    ]
    assert result.notes == ("a: one was left out", "b: one was left out")


def test_a_view_of_all_ranks_is_one_table(database: Database) -> None:
    assert database.query("SELECT * FROM example_count").rows() == [{"kernels": 2}]


def test_views_that_a_query_does_not_name_are_not_computed(database: Database) -> None:
    assert database.query("SELECT count(*) AS n FROM kernel").rows() == [{"n": 2}]
    assert calls == []


def test_a_view_that_a_query_names_twice_is_computed_once(database: Database) -> None:
    database.query("SELECT * FROM example_longest JOIN example_longest AS other USING (rank)")
    assert calls == ["longest", "longest"]  # once for each trace


def test_the_error_of_a_view_is_its_own(database: Database) -> None:
    with pytest.raises(ViewError, match=r"^there is nothing to see$"):
        database.query("SELECT * FROM example_refused")


def test_an_error_names_its_position(database: Database) -> None:
    with pytest.raises(QueryError) as caught:
        database.query("SELECT nam\nFROM kernel")
    text = str(caught.value)
    assert text.startswith('Binder Error: Referenced column "nam" not found in FROM clause!\nCandidate bindings: ')
    assert re.search(r"\nLINE 1: SELECT nam\n               \^+$", text)  # some versions underline the whole name


def test_an_unknown_table_is_answered_with_those_there_are(database: Database) -> None:
    with pytest.raises(QueryError, match=r"no table 'kernels_'; available: events, kernel, .*example_count"):
        database.query("SELECT * FROM kernels_")


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("SELECT 1; SELECT 2", "expected one SELECT statement, got 2 statements"),
        ("", "expected one SELECT statement, got 0 statements"),
        ("CREATE TABLE t AS SELECT 1", "expected a SELECT statement, got CREATE"),
        ("COPY kernel TO '/tmp/out'", "expected a SELECT statement, got COPY"),
        ("SET threads = 1", "expected a SELECT statement, got SET"),
        ("INSTALL httpfs", "expected a SELECT statement, got"),
        ("ATTACH '/tmp/other.db'", "expected a SELECT statement, got ATTACH"),
        ("SELECT CAST('a' AS INTEGER)", "Conversion Error"),
    ],
)
def test_what_is_no_query_or_fails_says_so(database: Database, sql: str, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        database.query(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "EXPLAIN {}", "EXPLAIN ANALYZE {}", "explain\nanalyze\t{}", "EXPLAIN (FORMAT json) {}",
        "EXPLAIN (ANALYZE, FORMAT json) {}", "EXPLAIN /* SELECT 1 */ ANALYZE {}", "/* EXPLAIN */ EXPLAIN {}",
        "EXPLAIN ANALYZE -- SELECT 1\n{}", "{}", " ;{}", "SELECT 1; {}", "EXPLAIN SELECT 1; {}",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE a AS SELECT 1", "CREATE OR REPLACE TEMP VIEW kernel AS SELECT 1", "DROP VIEW kernel",
        "INSERT INTO kernel VALUES (1)", "COPY kernel TO 'x.csv'", "ATTACH ':memory:' AS b", "PRAGMA version",
        "SET threads = 1", "SET VARIABLE a = 1", "INSTALL json", "LOAD json", "CALL pragma_version()", "CHECKPOINT",
        "PREPARE a AS SELECT 1", "EXECUTE a", "EXPORT DATABASE 'x'", "BEGIN", "USE memory", "VACUUM",
    ],
)  # fmt: skip
def test_nothing_but_a_query_is_run(database: Database, sql: str, statement: str) -> None:
    with pytest.raises(QueryError):
        database.query(sql.format(statement))
    assert database.query("SELECT count(*) AS n FROM kernel").rows() == [{"n": 2}]
    assert database.query("SELECT count(*) AS n FROM duckdb_tables()").rows() == [{"n": 0}]


@pytest.mark.parametrize(
    "head", ["EXPLAIN ", "EXPLAIN ANALYZE ", "explain analyze\n", "EXPLAIN (FORMAT json) ", "EXPLAIN (ANALYZE) "]
)
@pytest.mark.parametrize("query", ["SELECT 1", "(SELECT 1)", "FROM kernel", "WITH a AS (SELECT 1) FROM a"])
def test_a_query_can_be_explained(database: Database, head: str, query: str) -> None:
    assert database.query(head + query).rows()[0]["explain_key"]


def test_no_file_can_be_read(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "secret.csv"
    path.write_text("a,b\n1,2\n")
    for sql in (f"SELECT * FROM read_csv('{path}')", f"SELECT * FROM '{path}'", f"SELECT * FROM glob('{tmp_path}/*')"):
        with pytest.raises(QueryError):
            database.query(sql)


def test_what_is_closed_to_queries_stays_closed(database: Database) -> None:
    names = ("autoinstall_known_extensions", "autoload_known_extensions", "enable_external_access")
    found = database.query(f"SELECT name, value FROM duckdb_settings() WHERE name IN {names} ORDER BY name").rows()
    assert found == [{"name": name, "value": "false"} for name in names]
    for setting in ("threads = 1", "lock_configuration = false"):
        with pytest.raises(duckdb.InvalidInputException, match="configuration has been locked"):
            database._connection.execute(f"SET {setting}")


def test_variables_of_the_program_are_no_tables(database: Database) -> None:
    kernel_names = {"a": [1]}
    assert kernel_names
    with pytest.raises(QueryError, match="no table 'kernel_names'"):
        database.query("SELECT * FROM kernel_names")


def test_sums_of_integers_are_integers(database: Database) -> None:
    result = database.query("SELECT sum(duration_ns) AS total FROM kernel")
    assert (str(result.table.schema.field("total").type), result.rows()) == ("int64", [{"total": 7000}])


def test_describe_shows_the_columns(database: Database) -> None:
    rows = database.query("DESCRIBE example_longest").rows()
    assert [row["column_name"] for row in rows] == ["rank", "trace", "longest_us"]


def test_columns_of_one_name_are_told_apart(database: Database) -> None:
    assert database.query("SELECT 1 AS a, 2 AS a, 3 AS a_1").rows() == [{"a": 1, "a_1": 2, "a_1_1": 3}]


def test_what_was_lost_of_a_trace_is_a_note_of_every_answer() -> None:
    sources = [SqlSource("a", Context(trace({}, notes=("the end is missing",)))), SqlSource("b", Context(trace({})))]
    with Database(sources) as both:
        assert both.query("SELECT 1").notes == ("a: the end is missing",)
