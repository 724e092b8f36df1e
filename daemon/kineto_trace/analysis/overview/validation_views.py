"""What a trace has and what it lacks, and which analyses that concerns."""

from collections import defaultdict
from typing import Any

import numpy as np

from kineto_trace.analysis.overview.trace_parts import ENOUGH, PARTS
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import coverage_note
from kineto_trace.structure.event_arguments import arguments
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

# Types that HTA expects of arguments (its level "standard"): whole numbers, numbers, texts.
_TYPES: dict[str, type[int] | type[float] | type[str]] = {
    "stream": int,
    "correlation": int,
    "bytes": int,
    "memory bandwidth (GB/s)": float,
    "wait_on_stream": int,
    "wait_on_cuda_event_record_corr_id": int,
    "External id": int,
    "Python id": int,
    "Python parent id": int,
    "Collective name": str,
    "In msg nelems": int,
    "Out msg nelems": int,
    "dtype": str,
    "Group size": int,
    "Rank": int,
}
_LONGER = "request a larger buffer limit, a shorter capture or fewer activity types"
_SHARES_OF = defaultdict(
    lambda: "figures of what it records",
    kernel="utilization, idle time, shares of the GPU's time",
    cpu_op="shares of the host's time by role",
    python_function="time by line of Python, CPU time of threads",
)  # by the first table that a source fills
_TYPE_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text"}


@view(
    "validate",
    columns(
        ("part", "text", "", "what the trace should contain"),
        (
            "ok",
            "bool",
            "",
            f"it is there, for at least {ENOUGH:.0f} % of the rows that should have it; missing: no row should",
        ),
        ("rows", "int", "", "number of rows that are of this kind or should have it"),
        ("complete_pct", "float", "%", "share of these rows that have it; missing without rows"),
        ("needed_for", "text", "", "analyses that are empty or less exact without it"),
        ("advice", "text", "", "how to record it; missing if there is nothing to do"),
    ),
)
def validate(context: Context) -> Answer:
    """What analyses need from a trace, whether this trace has it, and how to record it if not.

    Arguments whose value has a different type than readers of Kineto traces expect (HTA's validate_trace_format) have a
    row of their own. The notes say what was lost when the trace was recorded or read. Advice names options of kinetoctl
    for traces that kinetod recorded, otherwise those of torch.profiler.
    """
    ours = bool(context.trace.target.capture_id)
    rows: list[tuple[str, bool | None, int, float | None, str, str | None]] = []
    for part in PARTS:
        found = part.find(context)
        good = part.is_there(found)
        advice = (part.with_kinetod if ours else part.missing) if good is False else None
        rows.append((part.name, good, found.rows, found.share, part.needed_for, advice))
    rows += [*_coverage(context), *_wrong_types(context)]
    names = [column.name for column in validate.columns]
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)}, _losses(context))


def _coverage(context: Context) -> list[tuple[str, bool, int, float | None, str, str | None]]:
    """One row for each source that states when it recorded: its share of the window."""
    trace = context.trace
    found: list[tuple[str, bool, int, float | None, str, str | None]] = []
    length = max(trace.window_end_ns - trace.window_start_ns, 1)
    for each in trace.coverage:
        count = sum(len(trace.table(kind)) for kind in each.kinds)
        share = 100 * max(1 - each.missing_ns / length, 0.0)
        advice = None if share >= ENOUGH else _LONGER
        found.append((f"coverage by {each.source}", share >= ENOUGH, count, share, _SHARES_OF[each.kinds[0]], advice))
    return found


def _losses(context: Context) -> list[str]:
    trace, losses, notes = context.trace, context.trace.losses, list(context.trace.notes)
    found = [coverage_note(each, trace.window_start_ns, trace.window_end_ns) for each in trace.coverage]
    notes += [note for note in found if note]
    for count, what in (
        (losses.dropped, "were dropped while it was recorded: buffers were full"),
        (losses.undecoded, "could not be read"),
        (losses.torn, "chunks were cut off: the daemon ended while it was recorded"),
    ):
        if count:
            notes.append(f"{count:,} records {what}" if "chunks" not in what else f"{count:,} {what}")
    return notes


def _wrong_types(context: Context) -> list[tuple[str, bool, int, float | None, str, str | None]]:
    rows: list[tuple[str, bool, int, float | None, str, str | None]] = []
    for kind, table in context.trace.tables.items():
        if not table.origin and "inputs" not in table.columns:
            continue
        found = arguments(context, kind)
        for key, wanted in _TYPES.items():
            accepted = (int, float) if wanted is float else wanted
            wrong = [value is not None and not isinstance(value, accepted) for value in found.values(key)]
            if not any(wrong):
                continue
            count = int(np.count_nonzero(np.array([*wrong, False])[found.text]))
            value = next(value for value, bad in zip(found.values(key), wrong, strict=True) if bad)
            share = 100 * (1 - count / len(table))
            advice = f"{str(value)[:40]!r} is not {_TYPE_NAMES[wanted]}: it counts as missing"
            rows.append((f"{kind}: argument {key}", False, len(table), share, "what reads this argument", advice))
    return rows
