"""SQL over traces: DuckDB reads the columns of traces and the results of analyses as tables, without copies."""

from kineto_trace.sql.database import Database
from kineto_trace.sql.schema import SqlColumn, SqlTable, find_table, sql_tables

__all__ = ["Database", "SqlColumn", "SqlTable", "find_table", "sql_tables"]
