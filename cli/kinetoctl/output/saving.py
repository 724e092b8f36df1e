"""Results into files, by the suffix of their names."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from kinetoctl.output.tables import csv_text, tell_notes
from kinetoctl.output.values import exact
from kinetoctl.settings import Settings
from kinetoctl.traces import write_errors

if TYPE_CHECKING:
    from kineto_trace.analysis.result import Result


def save_results(results: Mapping[str, "Result"], settings: Settings) -> None:
    """Writes the file that --output names, whole or not at all. Raises UsageError, NotWritten."""
    path = settings.file
    assert path is not None
    if len(results) > 1 and settings.output != "json":
        raise click.UsageError(f"{path} holds one table: name one --view of {', '.join(results)}")
    from kineto_trace.files import atomic_file

    with write_errors(path):
        for result in results.values():
            tell_notes(result.notes, settings)
        with atomic_file(path) as file:
            if settings.output == "parquet":
                import pyarrow.parquet as pq

                pq.write_table(next(iter(results.values())).table, file, compression="zstd")
            elif settings.output == "csv":
                file.write(csv_text(next(iter(results.values()))).encode())
            else:
                rows = {name: exact(result.rows()) for name, result in results.items()}
                document = rows if len(rows) > 1 else next(iter(rows.values()))
                file.write(json.dumps(document, indent=1, ensure_ascii=False).encode("utf-8", "replace"))
    if not settings.quiet:
        count = sum(map(len, results.values()))
        click.echo(f"{path}: {count:,} rows", err=True)
