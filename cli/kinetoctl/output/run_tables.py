"""Views of `kinetoctl report` about several runs of a program: the rows of each run by itself, the newest run first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kineto_trace.base.quantities import more

if TYPE_CHECKING:
    from kineto_trace.open.trace_discovery import Source
    from kineto_trace.view_api.result import Result

Results = Mapping[str, "Result"]  # by view


def side_by_side(
    runs: Sequence["Source"], results_of: Callable[["Source"], Results], limit_of: Callable[[str], int]
) -> dict[str, "Result"]:
    """By view, the rows of each run. runs: the oldest first. limit_of: rows of a view for each run, 0 for all."""
    from kineto_trace.catalog.first_screen import runs_text

    alike = len({source.path.name for source in runs}) < len(runs)
    found = {source.place if alike else source.path.name: results_of(source) for source in runs[::-1]}
    note = f"{runs_text(runs)} Each has its own rows, the newest first."
    views = dict.fromkeys(view for results in found.values() for view in results)
    return {
        view: _with_run({run: results[view] for run, results in found.items() if view in results}, note, limit_of(view))
        for view in views
    }


def _with_run(results: Mapping[str, "Result"], note: str, limit: int) -> "Result":
    """One table of those of several runs of a program, with the run in place of the rank. limit: rows of each run."""
    import pyarrow as pa
    from kineto_trace.view_api.result import columns

    from kinetoctl.output.result_tables import limited

    parts = {run: without_rank(limited(result, limit)) for run, result in results.items()}
    first = next(iter(parts.values()))
    tables = [
        result.table.add_column(0, "run", pa.array([run] * len(result), pa.string())) for run, result in parts.items()
    ]
    left = {run: rows for run, part in parts.items() if (rows := len(results[run]) - len(part))}
    return replace(
        first,
        columns=(*columns(("run", "text", "", "file or folder of the run")), *first.columns),
        table=pa.concat_tables(tables),
        notes=(
            note,
            *(f"{run}: {more(rows, 'row')} of {first.view} (--limit 0 shows all)" for run, rows in left.items()),
            *(f"{run}: {each}" for run, result in parts.items() for each in result.notes),
        ),
        failure="; ".join(f"{run}: {result.failure}" for run, result in parts.items() if result.failure),
    )


def without_rank(result: "Result") -> "Result":
    """A table for people of one trace need not say whose rows it has."""
    from kineto_trace.view_api.view import RANK

    if result.columns[: len(RANK)] != RANK or len(result.columns) == 1:
        return result
    return replace(result, columns=result.columns[1:], table=result.table.drop_columns(["rank"]))
