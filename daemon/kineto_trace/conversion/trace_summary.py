"""What a trace holds, in a few figures: the public interface's `Summary` message as a dictionary."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import intersection, union
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES
from kineto_trace.model.trace import COUNTER_TABLES, GPU_TABLES, UNTIMED_TABLES, Trace
from kineto_trace.structure.activity_links import whole_steps
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.structure.python.python_samples import WAITING, line_samples, state_counts
from kineto_trace.structure.python.thread_use import is_native, thread_use, window_ns
from kineto_trace.structure.recorded_time import recorded

TOP = 5
TOP_LINES = 3
NO_GPU = -1.0


def summarize(trace: Trace) -> dict[str, Any]:
    """Summarizes a trace. The keys are those of the message; times are in ns."""
    activities = Counter[str]()
    for kind, table in trace.tables.items():
        if len(table) and kind not in (*UNTIMED_TABLES, *COUNTER_TABLES):
            activities[trace.category(kind)] += len(table)
    iterations = whole_steps(Context(trace)).number.tolist()
    return {
        "activities": dict(activities),
        "gpu_busy_fraction": gpu_busy_fraction(trace),
        "top_kernels": top_kernels(trace),
        "top_ops": top_ops(trace),
        "top_functions": top_functions(trace),
        "python_samples": python_states(trace),
        "native_threads": native_threads(trace),
        "window_start_ns": trace.window_start_ns,
        "window_end_ns": trace.window_end_ns,
        "out_of_window": trace.losses.out_of_window,
        "iterations": len(iterations),
        "first_iteration": iterations[0] if iterations else 0,
    }


def gpu_busy_fraction(trace: Trace) -> float:
    """Returns the share of the window in which a GPU was busy, averaged over the GPUs with work; -1 if none had any.

    What was not recorded of the window does not count.
    """
    covered = recorded(trace, GPU_TABLES)
    window = covered.length()
    tables = [trace.table(kind) for kind in GPU_TABLES if len(trace.table(kind))]
    if not tables or window <= 0:
        return NO_GPU
    device = np.concatenate([table["device"] for table in tables])
    start = np.concatenate([table["start"] for table in tables])
    end = np.concatenate([table.end() for table in tables])
    shares = []
    for number in unique_values(device):
        own = device == number
        shares.append(intersection(union(start[own], end[own]), covered).length() / window)
    return float(np.mean(shares))


def top_kernels(trace: Trace) -> list[dict[str, Any]]:
    """Returns the kernels with the most total time."""
    table = trace.table("kernel")
    return _top(trace, table["name"], np.ones(len(table), np.int64), table["duration"])


def top_ops(trace: Trace) -> list[dict[str, Any]]:
    """Returns the operators with the most self time (without operators inside them)."""
    table = trace.table("cpu_op")
    if not len(table):
        return []
    nested = nest_tables([table], trace.window_end_ns)
    return _top(trace, table["name"][nested.order], np.ones(len(table), np.int64), nested.tree.self_time)


def top_functions(trace: Trace) -> list[dict[str, Any]]:
    """Returns the Python functions that ran in the most samples, each with its busiest lines.

    total_ns is the number of these samples times the sampling period; waiting counts further samples in which it waited
    for the GIL.
    """
    found = line_samples(trace)
    name = trace.table("python_function")["name"][found.row].astype(np.int64)
    busy = found.busy
    best = _top(trace, name, busy, busy * trace.sample_period_ns)
    numbers = {trace.strings[number]: number for number in unique_values(name).tolist()}
    for entry in best:
        own = np.flatnonzero(name == numbers[entry["name"]])
        entry["waiting"] = int(found.counts[own, WAITING].sum())
        lines = unique_values(found.line[own])
        counts = np.bincount(np.searchsorted(lines, found.line[own]), busy[own], len(lines)).astype(np.int64)
        entry["lines"] = [
            {"line": int(lines[place]), "count": int(counts[place])}
            for place in np.argsort(-counts, kind="stable")[:TOP_LINES].tolist()
            if lines[place] and counts[place]
        ]
    return best


def python_states(trace: Trace) -> dict[str, int]:
    """Returns the number of samples of Python threads by state; empty without samples."""
    counts = state_counts(trace.table("python_function")).sum(axis=0)
    names = ("unknown", *STATES[1:])
    return {name: int(count) for name, count in zip(names, counts, strict=True)} if counts.any() else {}


def native_threads(trace: Trace) -> list[dict[str, Any]]:
    """Returns the threads without Python that used the most CPU time."""
    uses = [use for use in thread_use(trace.target) if is_native(use) and use.cpu_ns][:TOP]
    names = trace.target.threads
    return [
        {
            "thread": use.thread,
            "name": names.get(use.thread, ""),
            "cpu_ns": use.cpu_ns,
            "cpu_fraction": use.cpu_ns / window_ns(trace),
        }
        for use in uses
    ]


def _top(
    trace: Trace, name: npt.NDArray[Any], count: npt.NDArray[Any], total: npt.NDArray[Any]
) -> list[dict[str, Any]]:
    if not len(name):
        return []
    totals = np.zeros(len(trace.strings), np.int64)
    counts = np.zeros(len(trace.strings), np.int64)
    np.add.at(totals, name, total)
    np.add.at(counts, name, count)
    best = np.argsort(-totals, kind="stable")[:TOP]
    return [
        {"name": trace.strings[number], "count": int(counts[number]), "total_ns": int(totals[number])}
        for number in best.tolist()
        if counts[number]
    ]
