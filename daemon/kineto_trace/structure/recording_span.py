"""The span of a recording: the profiler's own range if the file has it, otherwise that of all events."""

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import Flags
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, Table, Trace
from kineto_trace.structure.module_calls import is_lightning

PROFILER_SPAN = "PyTorch Profiler (0)"
RUNTIMES = ("runtime", *(f"{vendor}_runtime" for vendor in ("cuda", "mtia", "glow", "xpu", "privateuse1")))  # Kineto's
SPANNING = (*GPU_TABLES, "cuda_runtime", "cpu_op", "user_annotation", "gpu_user_annotation", "python_function")


def recording_span(context: Context) -> tuple[int, int]:
    """Returns start and end of the recording, in Unix ns."""
    tables = spanning_tables(context)
    if not tables:
        return context.trace.window_start_ns, context.trace.window_end_ns
    return min(int(table["start"].min()) for table in tables), max(int(table.end().max()) for table in tables)


def spanning_tables(context: Context) -> list[Table]:
    """Returns the events whose first start and last end bound the recording; no table is empty.

    In PyTorch Lightning's traces the calls of Python functions do not count, but those of all runtimes do.
    """
    trace = context.trace
    spans = events_of(trace, "trace")
    own = spans.take(np.array([trace.strings[name] == PROFILER_SPAN for name in spans["name"].tolist()], np.bool_))
    if len(own):
        return [own.take(np.argsort(own["start"], kind="stable")[-1:])]
    if is_lightning(trace):
        tables = [trace.table(kind) for kind in SPANNING if kind != "python_function"]
    else:
        tables = [runtime_calls(trace) if kind == "cuda_runtime" else trace.table(kind) for kind in SPANNING]
    return [table for table in (*tables, spans, events_of(trace, "python")) if len(table)]


def runtime_calls(trace: Trace) -> Table:
    """Returns the calls of the runtime whose category in the file, if there is one, is one that Kineto writes."""
    table = trace.table("cuda_runtime")
    if "category" not in table.origin:
        return table
    category, texts = table.origin["category"], trace.strings
    numbers = [
        number for number in unique_values(category).tolist() if number >= 0 and texts[number].lower() in RUNTIMES
    ]
    known = np.isin(category, numbers)
    return table if known.all() else table.take(known)


def events_of(trace: Trace, category: str) -> Table:
    """Returns the events with a duration of a category (in lower case) that has no table of its own."""
    table = trace.table("other")
    return table.take(in_categories(trace, table, (category,)))


def in_categories(trace: Trace, table: Table, categories: tuple[str, ...]) -> Flags:
    """Returns which rows of the table `other` have a duration and one of these categories (in lower case)."""
    known = np.array([text.lower() in categories for text in trace.strings] + [False])
    found: Flags = known[table["category"]] & (table["phase"] == ord("X"))
    return found
