"""The tables of `kinetoctl query`, as text or for programs."""

from collections.abc import Sequence
from typing import Any

from kineto_trace.model.activity_table import ActivityTable
from kineto_trace.sql.schema import SqlTable, find_table, sql_tables

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.output.console import print_table, say_text
from kinetoctl.output.json_yaml import emit

TABLES = ("TABLE", "COLUMNS", "WHAT IT HOLDS")
COLUMNS = ("COLUMN", "TYPE", "UNIT", "MEANING")


def show_tables(declared: Sequence[ActivityTable], settings: CommonOptions) -> None:
    """Prints all tables, one per line; for programs, with their columns. declared: those of traces themselves."""
    tables = sql_tables(declared).values()
    if settings.output == "table":
        rows = [(table.name, str(len(table.columns)), table.summary) for table in tables]
        print_table(TABLES, rows, color=settings.color)
        say_text("`kinetoctl query --schema TABLE` describes the columns of a table")
    else:
        emit([_document(table) for table in tables], settings.output)


def show_table(name: str, declared: Sequence[ActivityTable], settings: CommonOptions) -> None:
    """Prints the description and columns of one table. Raises QueryError."""
    table = find_table(name, declared)
    if settings.output != "table":
        emit(_document(table), settings.output)
        return
    say_text(f"{table.name}\n\n{table.description}\n")
    rows = [(column.name, column.type, column.unit or "-", column.meaning) for column in table.columns]
    print_table(COLUMNS, rows, color=settings.color)


def _document(table: SqlTable) -> dict[str, Any]:
    columns = [
        {"name": column.name, "type": column.type, "unit": column.unit, "meaning": column.meaning}
        for column in table.columns
    ]
    return {"name": table.name, "group": table.group, "description": table.description, "columns": columns}
