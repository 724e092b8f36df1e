"""Running views over traces: in this process, in several, or on a cluster."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kineto_trace.open.trace_discovery import Source

F = TypeVar("F")
COMPATS = ("plugin", "hta")


def job_options(function: Any) -> Any:
    """Adds --workers and --scheduler."""
    for option in (
        click.option(
            "--scheduler",
            metavar="ADDRESS",
            help="Dask scheduler that analyses the ranks, for example tcp://host:8786.",
        ),
        click.option(
            "--workers",
            metavar="N",
            type=click.IntRange(1),
            help="Number of processes that analyse the ranks.  [default: by cores and memory]",
        ),
    ):
        function = option(function)
    return function


@contextmanager
def executor_for(
    sources: Sequence["Source"], workers: int | None, scheduler: str | None
) -> Iterator["Executor | None"]:
    """Yields None to let the trace library choose. Raises UsageError, TraceError."""
    if workers and scheduler:
        raise click.UsageError("--workers and --scheduler exclude each other: the cluster has its own workers")
    from kineto_trace.catalog.view_runner import cluster, pool

    if scheduler:
        with cluster(scheduler) as executor:
            yield executor
    elif workers and len(sources) > 1:
        with pool(sources, workers) as executor:
            yield executor
    else:
        yield None
