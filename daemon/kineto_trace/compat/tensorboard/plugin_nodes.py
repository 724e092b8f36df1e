"""What the TensorBoard plug-in's operator tree is made of: nodes, calls and GPU activities, as the plug-in sees them.

Theory of operation
    The plug-in computes with the microseconds of the file as doubles: the end of an event is start + duration, rounded.
    Events that touch in truth may overlap by a fraction of a nanosecond then, and an operator that overlaps another
    one in part is dropped from the tree. So the same doubles are made here: integers that a double holds, divided by
    1000; of larger ones the whole microseconds and the rest.

    Nodes are operators, steps ("ProfilerStep#N", also those that gpu_user_annotation shows), calls of nn.Module,
    and of the annotations only data loading, optimizer steps and the ten collectives that the plug-in knows. Their
    thread is the number in the file; the one of a gpu_user_annotation is its stream. Events of the old category
    "python" are nodes, but no operators.

    Of traces of PyTorch Lightning (`Framework`) the modules are operators called "[pl][module]…", Python calls do
    not count, and operators called "[pl][profile]…" are no part of this tree.
"""

import json
import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import distinct, lookup, unique_values
from kineto_trace.formats.chrome.chrome_tables import whole_number
from kineto_trace.model.activity_tables import KINDS, STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.model.event_kinds import DUR_REAL, FIRST_ARG_BIT, TS_REAL
from kineto_trace.model.trace import GPU_TABLES, NO_MODULE, OP_TABLES, TEXT_ID, Table, Trace
from kineto_trace.structure.module_calls import LIGHTNING_MODULE, is_lightning
from kineto_trace.structure.recording_span import in_categories, runtime_calls

NOTHING = -1
EXACT_IN_DOUBLE = 1 << 53
COLLECTIVES = frozenset(
    f"{library}:{name}"
    for library in ("nccl", "gloo")
    for name in ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
)
NO_OPERATORS = frozenset({"DataParallel.forward", "DistributedDataParallel.forward"})
LIGHTNING_PROFILE = "[pl][profile]"
TABLES = ("python_function", "user_annotation", "cpu_op", "gpu_user_annotation", "other")  # by number
PYTHON_FUNCTION, CPU_OP, OTHER = 0, 2, 4
_DATA_LOADER = re.compile(r"enumerate\(DataLoader\)#.*\.__next__$|enumerate\(DataPipe\)#", re.DOTALL)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Node(IntEnum):
    """Kinds of nodes."""

    OPERATOR = 0
    STEP = 1
    MODULE = 2
    LIGHTNING_MODULE = 3
    DATA_LOADER = 4
    OPTIMIZER = 5
    NONE = 6  # no node


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes in the order of the file, which decides between equal intervals, else table by table. Times in µs.

    table: number into TABLES; row: in that table. typed: its event is of the type Operator. external: its external
    id; NOTHING: none.
    """

    kind: npt.NDArray[np.uint8]
    table: npt.NDArray[np.uint8]
    row: Ints
    name: npt.NDArray[np.int32]
    thread: Ints
    start: Floats
    end: Floats
    typed: Flags
    external: Ints


@dataclass(frozen=True, slots=True)
class PluginLaunches:
    """Runtime calls and GPU activities. Times in µs as doubles.

    external: of each call; NOTHING: none. duration: of each call. call: of each GPU activity the place of its call;
    NOTHING: none. kind: of each activity, number into GPU_TABLES; row: in that table.
    """

    external: Ints
    thread: Ints
    duration: Floats
    call: Ints
    kind: npt.NDArray[np.uint8]
    row: Ints
    name: npt.NDArray[np.int32]
    device_duration: Floats


def base_ns(trace: Trace) -> int:
    """Returns the origin (Unix ns) of the file's times as the file or, of our own captures, the exporter states it."""
    if trace.head is None:
        return trace.window_start_ns // TRIMONTH_NS * TRIMONTH_NS
    try:
        return int(json.loads(trace.head.get("baseTimeNanoseconds", "0")))
    except (ValueError, TypeError):
        return 0


TRIMONTH_NS = 7_889_238 * 10**9  # of Kineto's baseTimeNanoseconds, as in formats/chrome/chrome_writer.py


def microseconds(ns: Ints, base: int = 0) -> Floats:
    """Returns the doubles that reading the file gives for these times, which are the nearest ones."""
    relative = np.asarray(ns - base)
    found: Floats = relative / 1000.0
    large = np.abs(relative) >= EXACT_IN_DOUBLE
    if large.any():
        whole, rest = np.divmod(relative[large], 1000)
        found[large] = whole + rest / 1000.0
    return found


def orderable(times: Floats) -> Ints:
    """Returns integers in the same order as these doubles (of equal sign)."""
    bits = (times + 0.0).view(np.int64)
    return np.where(bits >= 0, bits, np.int64(-(2**63)) - bits)


def nodes(context: Context) -> Nodes:
    """Returns all nodes of all threads."""
    trace = context.trace
    base, kinds = base_ns(trace), _kinds_of_names(trace)
    parts = [_nodes_of(trace, number, base, kinds) for number in range(len(TABLES))]
    found = Nodes(*(np.concatenate([getattr(part, name) for part in parts]) for name in Nodes.__slots__))
    tables = [trace.table(name) for name in TABLES]
    if not all("place" in table.origin for table in tables if len(table)):
        return found
    own = [table.origin["place"][part.row] for table, part in zip(tables, parts, strict=True) if len(part.row)]
    order = np.argsort(np.concatenate([np.empty(0, np.int64), *own]), kind="stable")
    return Nodes(*(getattr(found, name)[order] for name in Nodes.__slots__))


def _kinds_of_names(trace: Trace) -> npt.NDArray[np.uint8]:
    """Returns for each string the kinds that an operator and an annotation of that name have."""
    lightning = is_lightning(trace)
    found = np.empty((2, len(trace.strings)), np.uint8)
    for number, text in enumerate(trace.strings):
        if text.startswith(STEP_PREFIX):
            found[:, number] = Node.STEP
        elif lightning and text.startswith(LIGHTNING_MODULE):
            found[:, number] = Node.LIGHTNING_MODULE, Node.NONE
        elif lightning and text.startswith(LIGHTNING_PROFILE):
            found[:, number] = Node.NONE
        elif _DATA_LOADER.match(text):
            found[:, number] = Node.DATA_LOADER
        elif text.startswith("Optimizer.step"):
            found[:, number] = Node.OPTIMIZER
        else:
            found[:, number] = Node.OPERATOR, Node.OPERATOR if text in COLLECTIVES else Node.NONE
    return found


def _nodes_of(trace: Trace, number: int, base: int, kinds: npt.NDArray[np.uint8]) -> Nodes:
    table = trace.table(TABLES[number])
    of_name = kinds[0 if number in (CPU_OP, OTHER) else 1]
    if number == OTHER:  # events of the category "python" are neither steps nor Lightning's
        lightning = (Node.STEP, Node.LIGHTNING_MODULE, Node.NONE)
        of_name = np.where(np.isin(of_name, lightning), Node.OPERATOR, of_name).astype(np.uint8)
    if number == PYTHON_FUNCTION:
        of_name = np.full(len(trace.strings) + 1, Node.NONE if is_lightning(trace) else Node.MODULE, np.uint8)
    wanted = of_name[table["name"]] != Node.NONE
    if number == PYTHON_FUNCTION:
        wanted &= table["module"] != NO_MODULE
    elif number == OTHER:
        wanted &= in_categories(trace, table, ("python",))
    rows = np.flatnonzero(wanted)
    kind = of_name[table["name"][rows]]
    start, duration = file_times(table, base)
    return Nodes(
        kind=kind,
        table=np.full(len(rows), number, np.uint8),
        row=rows,
        name=table["name"][rows],
        thread=_as_numbers(trace, file_threads(table)[rows]),
        start=start[rows],
        end=(start + duration)[rows],
        typed=np.isin(kind, (Node.OPERATOR, Node.DATA_LOADER, Node.OPTIMIZER)) & (number == CPU_OP),
        external=external_ids(table)[rows] if number != PYTHON_FUNCTION else np.full(len(rows), NOTHING, np.int64),
    )


def file_times(table: Table, base: int) -> tuple[Floats, Floats]:
    """Returns starts and durations in microseconds, as the file has them."""
    times = []
    for column, real, bit in (("start", "ts_real", TS_REAL), ("duration", "dur_real", DUR_REAL)):
        time = microseconds(table[column], base if column == "start" else 0)
        if real in table.origin:  # not whole nanoseconds
            time = np.where(table.origin["present"] & np.uint64(bit) != 0, table.origin[real], time)
        times.append(time)
    return times[0], times[1]


def external_ids(table: Table) -> Ints:
    """Returns the external id of each row as the file has it, or NOTHING."""
    column = table.columns.get("id" if table.kind in OP_TABLES else "external_id")
    column = table.origin.get("external_id", column)
    if column is None:
        return np.full(len(table), NOTHING, np.int64)
    known = column != 0
    if "present" in table.origin:
        bits = sum(1 << (FIRST_ARG_BIT + n) for n, arg in enumerate(KINDS[table.kind]) if arg.column == "external_id")
        known = table.origin["present"] & np.uint64(bits) != 0
    return np.where(known, column, NOTHING).astype(np.int64)


def file_threads(table: Table) -> Ints:
    """Returns the thread of each row as the file numbers it; for a gpu_user_annotation, this is the stream."""
    if "tid" in table.origin:
        found: Ints = table.origin["tid"]
        return found
    return table["thread" if "thread" in table.columns else "stream"].astype(np.int64)


def _as_numbers(trace: Trace, threads: Ints) -> Ints:
    """Replaces texts that are numbers by these numbers, as the plug-in does for nodes, but for nothing else."""
    texts = unique_values(threads[threads <= TEXT_ID])
    if not len(texts):
        return threads
    wholes = [whole_number(text, trace.strings) for text in texts.tolist()]
    numbers = np.array(
        [one if isinstance(one, int) else text for one, text in zip(wholes, texts.tolist(), strict=True)]
    )
    found: Ints = np.where(
        threads <= TEXT_ID, numbers[np.searchsorted(texts, threads).clip(0, len(texts) - 1)], threads
    )
    return found


def launches(context: Context) -> PluginLaunches:
    """Returns the calls that the plug-in takes for runtime calls (not those to the driver), and the GPU activities."""
    trace = context.trace
    base, calls = base_ns(trace), runtime_calls(trace)
    tables = [trace.table(kind) for kind in GPU_TABLES]
    times = [file_times(table, base) for table in tables]
    start, duration = (np.concatenate([each[n] for each in times]) for n in range(2))
    correlation = np.concatenate([table["correlation"] for table in tables])
    call_start, call_duration = file_times(calls, base)
    return PluginLaunches(
        external=external_ids(calls),
        thread=file_threads(calls),
        duration=call_start + call_duration - call_start,
        call=_calls_of(correlation, start, calls["correlation"], call_start),
        kind=np.repeat(np.arange(len(tables), dtype=np.uint8), [len(table) for table in tables]),
        row=np.concatenate([np.arange(len(table), dtype=np.int64) for table in tables]),
        name=np.concatenate([table["name"] for table in tables]),
        device_duration=start + duration - start,
    )


def _calls_of(
    correlation: npt.NDArray[np.uint32], start: Floats, called: npt.NDArray[np.uint32], call_start: Floats
) -> Ints:
    """Returns each activity's call by correlation id: of several the last one before it, else the first one."""
    places = np.arange(len(called))
    if len(distinct(called)) == len(called):
        found: Ints = lookup(correlation, called, places, NOTHING)
        return found
    order = np.lexsort((call_start, called))
    first = np.searchsorted(called[order], correlation, side="left")
    stop = np.searchsorted(called[order], correlation, side="right")
    # Of each activity's calls (they are sorted by time): how many begin before it.
    merged = np.lexsort(
        (
            np.repeat([0, 1], [len(order), len(start)]),
            np.concatenate([call_start[order], start]),
            np.concatenate([called[order], correlation]),
        )
    )
    before = np.cumsum(merged < len(order))
    rank = np.empty(len(merged), np.int64)
    rank[merged] = before
    last = rank[len(order) :] - 1
    chosen = np.clip(last, first, np.maximum(stop - 1, 0))
    return np.where(stop > first, order[np.minimum(chosen, len(order) - 1)], NOTHING)
