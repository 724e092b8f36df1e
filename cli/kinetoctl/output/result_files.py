"""Writes results into files, in the format of their suffix."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.file_errors import write_errors
from kinetoctl.client.result_rows import plain_rows
from kinetoctl.output.console import say
from kinetoctl.output.result_tables import documents, limited, one_of, remarks, tell_notes

if TYPE_CHECKING:
    from kineto_trace.view_api.result import Result


def save_results(
    results: Mapping[str, "Result"], settings: CommonOptions, *, limit: int = 0, named: bool = True
) -> None:
    """Writes the file that --output names atomically. Raises UsageError, NotWritten.

    limit: rows of each, 0 for all. named: whether JSON has the names and columns of the results or only the rows.
    """
    path = settings.file
    assert path is not None
    from kineto_trace.base.atomic_files import write_atomically
    from kineto_trace.view_api.result_files import write_result

    with write_errors(path):
        if settings.output == "json":
            (only,) = results.values() if not named else (None,)
            value = documents(results, limit) if only is None else plain_rows(limited(only, limit))
            write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        else:
            write_result(limited(one_of(results, str(path)), limit), path, settings.output)
    for result in results.values():
        tell_notes(remarks(result), settings)
    if not settings.quiet:
        count = sum(len(limited(result, limit)) for result in results.values())
        say(f"{path}: {count:,} {'row' if count == 1 else 'rows'}", err=True)
