"""Views for tests of jobs. Workers need them too: ProcessPoolExecutor(initializer=register)."""

import os
from collections.abc import Sequence
from typing import Any

from kineto_trace.errors import TraceError
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import VIEWS, Answer, view

LONGEST = "test_longest_kernel"
SPREAD = "test_spread"
FATAL = "test_fatal"


def register() -> None:
    """Registers the views, once per process."""
    if LONGEST in VIEWS:
        return

    @view(LONGEST, columns(("duration", "int", "ns", "of the longest kernel")))
    def longest(context: Context, *, least: int = 0) -> Answer:
        """A plain view that fails without kernels."""
        durations = context.trace.table("kernel")["duration"]
        if not len(durations):
            raise TraceError("there are no kernels")
        return Answer({"duration": [max(int(durations.max()), least)]}, ["all kernels"])

    def spread_of(partials: Sequence[tuple[int, Any]]) -> Answer:
        values = [value for _, value in partials]
        return Answer({"ranks": [len(values)], "spread": [max(values) - min(values)]})

    @view(
        SPREAD,
        columns(("ranks", "int", "", "how many"), ("spread", "int", "ns", "of the kernel time")),
        reduce=spread_of,
    )
    def spread(context: Context) -> int:
        """A view over all ranks."""
        return int(context.trace.table("kernel")["duration"].sum())

    @view(FATAL, columns(("duration", "int", "ns", "nothing")))
    def fatal(context: Context) -> Answer:
        """A view that kills the process of rank 1."""
        if context.rank == 1:
            os._exit(9)
        return Answer({"duration": [context.rank]})


def unregister() -> None:
    """Removes the views from the process of the tests."""
    for name in (LONGEST, SPREAD, FATAL):
        VIEWS.pop(name, None)


def dask_plugin() -> Any:
    """Registers them in all workers of a cluster, also in those that take the place of dead ones."""
    from distributed import WorkerPlugin

    class Views(WorkerPlugin):
        name = "views"

        def setup(self, worker: object) -> None:
            register()

    return Views()
