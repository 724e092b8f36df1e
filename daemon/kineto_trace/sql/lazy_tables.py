"""A table that makes its columns when a query reads them.

Theory of operation
    DuckDB asks an Arrow dataset for its schema when a query is bound, and then once per scan for a scanner of the
    columns that the plan needs, with the filters that it pushed down. LazyTable is such a dataset; its scanner calls
    `make` for exactly these columns. DuckDB may name columns in the filter alone, so that these are looked for, too.
    An error in `make` reaches DuckDB as a text; `error` keeps it as it was.
"""

import re
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

BATCH_ROWS = 1 << 20
Make = Callable[[Sequence[str]], pa.Table]  # of the names of columns, in the order of the schema


class LazyTable(ds.Dataset):  # type: ignore[misc]  # pyarrow ships no types
    """make(names) gives a table of these columns. lock: held meanwhile, since traces are not for several threads."""

    def __init__(self, schema: pa.Schema, make: Make, lock: RLock) -> None:
        self._own_schema = schema
        self._make = make
        self._lock = lock
        self.error: Exception | None = None

    @property
    def schema(self) -> pa.Schema:
        """The schema of all columns."""
        return self._own_schema

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **options: Any) -> Any:
        """Called by DuckDB. columns: None for all."""
        wanted = set(self._own_schema.names if columns is None else columns)
        if filter is not None:
            wanted |= set(re.findall(r"\w+", str(filter)))
        names = [name for name in self._own_schema.names if name in wanted]
        try:
            with self._lock:
                table = self._make(names)
        except Exception as exc:
            self.error = exc
            raise
        options.setdefault("batch_size", BATCH_ROWS)
        return ds.dataset(table).scanner(columns=columns, filter=filter, **options)
