"""The finding on a program that stands still: where its main thread was all the time, and what it waits for.

All other findings say what to do faster, so where nothing moves, this one stands alone. Nothing moves if the trace has
no step, operator or work of a GPU, if the main thread waited at one line in STILL of its samples (for a GPU, it spins),
and if no other thread ran in more than MOVES of its own. A server without requests looks the same, which is why the
title says what was seen and no more.
"""

from collections.abc import Iterator

import numpy as np

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_time.user_calls import host_steps
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import Flags, Ints
from kineto_trace.base.quantities import format_duration
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import WAITS
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.library_calls import CallKind, CodePlace, code_place, is_users, library_call
from kineto_trace.structure.python_frames import IDLE, WAITING, callee_kind, callee_samples, line_samples, state_counts

STANDS_STILL = "stands_still"
NOTHING_MOVED = "Nothing moved: "  # what its title begins with
LEAST_SAMPLES = 20
STILL = 0.95
MOVES = 0.1
MAX_FRAMES = 1000
_BY_CALL = {
    CallKind.COLLECTIVE: "waits in {function}",
    CallKind.NETWORK: "waits for the network",
    CallKind.SUBPROCESS: "waits for a child process",
    CallKind.WORKER_WAIT: "waits for a DataLoader worker",
    CallKind.IMPORT: "waits for an import",
    CallKind.SLEEP: "sleeps",
}
_BY_REASON = {
    "idle_sleep": "sleeps",
    "idle_lock": "waits for a lock",
    "idle_poll": "waits for events",
    "idle_io": "waits for a file, a pipe or the network",
    "idle_child": "waits for a child process",
    "idle_driver": "waits in a driver",
    "idle_memory": "waits for memory to be read from storage",
}
_VAGUE = ("idle_poll", "idle_io")  # the callee says more
_ADVICE = (
    "If it should have made progress, it hangs there, or waits for another thread, process or rank that hangs. "
    "`kinetoctl stacks {pid}` (for a job: `kinetoctl stacks --rank all`) shows where all of them are, and which one "
    "the others wait for."
)


def standing(context: Context) -> Iterator[Finding]:
    """Yields the finding if nothing moves."""
    trace, table = context.trace, context.trace.table("python_function")
    if context.get(host_steps).told or len(trace.table("cpu_op")) or len(context.get(gpu)):
        return
    counts, own = state_counts(table), table["thread"] == trace.target.pid
    total = int(counts[own].sum())
    if total < LEAST_SAMPLES or _others_move(counts[~own], table["thread"][~own]):
        return
    name, line, samples = _main_place(context, own)
    if samples < STILL * total:
        return
    rows = np.flatnonzero(own & (table["name"] == name))
    row = int(rows[np.argmax(counts[rows].sum(axis=1))])
    stack = _stack(context, row, line or int(table["line"][row]))
    if not (does := _does(context, rows, counts[rows].sum(axis=0), stack)):
        return
    place = next((each for each in stack if is_users(each)), stack[0])
    of_all = "all" if samples == total else f"{samples} of {total}"
    window = format_duration(trace.window_end_ns - trace.window_start_ns)
    yield Finding(
        name=STANDS_STILL,
        title=f"{NOTHING_MOVED}the main thread {does} in {place.short}",
        saving_ns=0,
        advice=_ADVICE.format(pid=trace.target.pid),
        evidence=f"{of_all} samples of the main thread in {window} are at this line; no step, operator or GPU work was "
        "recorded, and no other Python thread ran",
        frame=row,
        where=str(place),
    )


def _others_move(counts: Ints, thread: Ints) -> bool:
    for each in unique_values(thread).tolist():
        own = counts[thread == each].sum(axis=0)
        if own.sum() - own[IDLE] - own[WAITING] > MOVES * own.sum():
            return True
    return False


def _main_place(context: Context, own: Flags) -> tuple[int, int, int]:
    """Returns the function (string number) and line in which these slices have most samples, and their number."""
    found, name = line_samples(context.trace), context.trace.table("python_function")["name"].astype(np.int64)
    chosen = own[found.row]
    row, line = found.row[chosen], found.line[chosen]
    places = group([name[row], line])
    samples = places.sums(found.counts[chosen].sum(axis=1))
    most = int(np.argmax(samples))
    first = int(places.first[most])
    return int(name[row[first]]), int(line[first]), int(samples[most])


def _callee(context: Context, rows: Ints) -> str:
    """Returns the function outside Python in which slices have most of their own samples; "" if there is none."""
    found = callee_samples(context.trace)
    samples = np.where(np.isin(found.row, rows), found.counts.sum(axis=1), 0)
    return found.names[int(found.name[np.argmax(samples)])] if samples.any() else ""


def _stack(context: Context, row: int, line: int) -> list[CodePlace]:
    """Returns the places of a slice and its callers, innermost first."""
    table, strings, stack = context.trace.table("python_function"), context.trace.strings, list[CodePlace]()
    while 0 <= row < len(table) and len(stack) < MAX_FRAMES:  # a file may have a cycle
        stack.append(code_place(strings[int(table["name"][row])], line))
        row, line = int(table["parent"][row]), int(table["call_line"][row])
    return stack


def _does(context: Context, rows: Ints, counts: Ints, stack: list[CodePlace]) -> str:
    """Returns what it waits for, in words that follow "the main thread"; "" if it runs."""
    table = context.trace.table("python_function")
    if 2 * counts[WAITING] > counts.sum():
        holder = int(table["gil_holder"][rows].max())
        name = context.trace.target.threads.get(holder, str(holder))
        return f"waits for the GIL, which thread {name} holds," if holder else "waits for the GIL"
    if 2 * counts[IDLE] <= counts.sum():
        callee = _callee(context, rows)
        return f"waits for the GPU ({callee})" if callee_kind(callee) == CallKind.ITEM else ""
    for each in stack:
        if is_users(each):
            break
        if (words := _BY_CALL.get(library_call(each)[0])) is not None:
            return words.format(function=each.shown)
    callee = _callee(context, rows) if is_users(stack[0]) else ""
    samples, reason = max((int(table[name][rows].sum()), name) for name in WAITS if name in _BY_REASON)
    if callee and (not samples or reason in _VAGUE):
        return f"waits in {callee}()"
    words = _BY_REASON[reason] if samples else "waits"
    return f"{words} ({callee})" if callee else words
