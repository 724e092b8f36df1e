"""What a trace may have, how to tell whether it has it, and how to record it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.host_time.op_inputs import SHAPES
from kineto_trace.analysis.kernels.counter_views import CATEGORY
from kineto_trace.arrays.id_sets import distinct
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_SEQUENCE, NO_STRING
from kineto_trace.structure.activity_links import gpu, steps, whole_steps
from kineto_trace.structure.call_stacks import ARGUMENT as CALL_STACK
from kineto_trace.structure.event_arguments import argument_objects

ENOUGH = 98.0  # % of rows: those at the edges of a recording always miss something


class PartRows(NamedTuple):
    """How many rows there are, and how many of them have what is wanted."""

    rows: int
    complete: int

    @property
    def share(self) -> float | None:
        """Returns the share of the rows that have it, in %; None without rows."""
        return 100 * self.complete / self.rows if self.rows else None


class TracePart(NamedTuple):
    """Something that a trace may have.

    missing: how to record it in a program that uses torch.profiler; with_kinetod: with kinetoctl trace. option: the
    latter in short, for what a report lists if it is missing; "": it is not listed. of: the tables that it describes,
    if it has none of its own. kinds: its own tables. request: option of a capture, named as in the public `Options`,
    that records it; "": none does. by_default: recorded without options too, where the process offers it.
    """

    name: str
    needed_for: str
    missing: str
    with_kinetod: str
    find: Callable[[Context], PartRows]
    of_some: bool = False  # it may well be that no row should have it
    option: str = ""
    of: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    request: str = ""
    by_default: bool = False

    def is_there(self, found: PartRows) -> bool | None:
        """Tells whether a trace with these rows has it; None if no row should have it."""
        if self.of_some and found.share is None:
            return None
        return found.share is not None and found.share >= ENOUGH


def _table(kind: str) -> Callable[[Context], PartRows]:
    def find(context: Context) -> PartRows:
        count = len(context.trace.table(kind))
        return PartRows(count, count)

    return find


def _activities(context: Context) -> PartRows:
    count = len(context.get(gpu))
    return PartRows(count, count)


def _calls(context: Context) -> PartRows:
    count = sum(len(context.trace.table(kind)) for kind in API_TABLES)
    return PartRows(count, count)


def _launched(context: Context) -> PartRows:
    return PartRows(len(context.get(gpu)), int(np.count_nonzero(context.get(gpu).call >= 0)))


def _attributed(context: Context) -> PartRows:
    """Of the launched activities."""
    work = context.get(gpu)
    return PartRows(int(np.count_nonzero(work.call >= 0)), int(np.count_nonzero((work.call >= 0) & (work.op >= 0))))


def _steps(context: Context) -> PartRows:
    """Of those that were recorded; the first and the last one are incomplete in most recordings by time."""
    count = len(context.get(whole_steps))
    return PartRows(count or len(context.get(steps)), count)


def _shapes(context: Context) -> PartRows:
    count = len(context.trace.table("cpu_op"))
    return PartRows(count, count if _some_operator_has(context, *SHAPES) else 0)


def _python(context: Context) -> PartRows:
    """Of older files, the stacks that they tell of each operator."""
    count = len(context.trace.table("python_function"))
    if not count and _some_operator_has(context, CALL_STACK):
        count = len(context.trace.table("cpu_op"))
    return PartRows(count, count)


def _some_operator_has(context: Context, *arguments: str) -> bool:
    """Tells whether any operator has one of these arguments, which have no column of their own."""
    strings, wanted = context.trace.strings, [f'"{name}":' for name in arguments]
    inputs = context.trace.table("cpu_op")["inputs"]
    texts = distinct(inputs[inputs != NO_STRING]).tolist()
    return any(name in strings[number] for number in texts for name in wanted)


def _sequences(context: Context) -> PartRows:
    sequence = context.trace.table("cpu_op")["sequence"]
    return PartRows(len(sequence), len(sequence) if (sequence != NO_SEQUENCE).any() else 0)


def _collectives(context: Context) -> PartRows:
    work = context.get(gpu)
    rows = work.row[work.communication]
    if not len(context.trace.table("kernel").origin):
        return PartRows(len(rows), 0)
    places, _ = argument_objects(context, "kernel", "Collective name")
    return PartRows(len(rows), int(np.count_nonzero(places[rows] >= 0)))


def _ranges(context: Context) -> PartRows:
    other, names = context.trace.table("other"), context.trace.strings
    wanted = np.array([*(text == CATEGORY for text in names), False], np.bool_)
    count = int(np.count_nonzero(wanted[other["category"]]))
    return PartRows(count, count)


def _rank(context: Context) -> PartRows:
    return PartRows(1, int(context.trace.target.rank is not None))


STEPS = "training steps"
_PROFILER = "torch.profiler.profile"
_TRACE = "kinetoctl trace"
_CALLS = "record cuda_runtime and cuda_driver activities"
_OUR_CALLS = f"{_TRACE} without --activities, or with cuda_runtime and cuda_driver among them, without another profiler"
_QUEUED = "work that was queued before the trace began has no launch in it"
_DEFAULT = f"{_TRACE} without --activities"
_OUR_OPS = f"{_TRACE} without --activities, or with cpu_op among them"
PARTS = (
    TracePart(
        "GPU activities",
        "all views of the GPU's time",
        "record CUDA activities",
        f"{_TRACE} without --activities, or with kernel,gpu_memcpy,gpu_memset, while the process uses its GPU",
        _activities,
        option=_DEFAULT,
        kinds=GPU_TABLES,
    ),
    TracePart(
        "calls of the runtime and driver",
        "launches, queue lengths, idle time by cause, operators' GPU time",
        _CALLS,
        _OUR_CALLS,
        _calls,
        option=_DEFAULT,
        of=GPU_TABLES,
        kinds=API_TABLES,
    ),
    TracePart(
        "launches of GPU activities",
        "launches, queue lengths, host_wait in idle time, operators' GPU time",
        f"{_CALLS}; {_QUEUED}",
        f"{_OUR_CALLS}; {_QUEUED}",
        _launched,
    ),
    TracePart(
        "operators",
        "operator views, delays, sequences, modules",
        "record CPU activities",
        _OUR_OPS,
        _table("cpu_op"),
        option=_DEFAULT,
        kinds=("cpu_op",),
    ),
    TracePart(
        "operators around launches",
        "operators' GPU time",
        "launches outside operators are those of other libraries",
        "launches outside operators are those of other libraries",
        _attributed,
        of_some=True,
    ),
    TracePart(
        STEPS,
        "all views by step",
        "call step() of the profiler after each step, and record at least one step from beginning to end",
        "trace for longer than a step; programs without torch's optimizers call kineto_agent.step() after each step",
        _steps,
        option=f"{_TRACE} with a longer --duration",
    ),
    TracePart(
        "input shapes",
        "operators by shape, matrix sizes",
        f"use {_PROFILER}(record_shapes=True)",
        f"{_TRACE} --record-shapes",
        _shapes,
        option=f"{_TRACE} --record-shapes",
        of=("cpu_op",),
        request="record_shapes",
    ),
    TracePart(
        "links from backward to forward operators",
        "backward modules, recomputation",
        "record CPU activities",
        _OUR_OPS,
        _sequences,
    ),
    TracePart(
        "Python stacks",
        "call stacks, modules, flame graphs, what the host does outside of operators",
        f"use {_PROFILER}(with_stack=True)",
        f"{_TRACE} --with-stack, or --with-stack=trace for every call",
        _python,
        option=f"{_TRACE} --with-stack",
        kinds=("python_function",),
        request="with_stack",
        by_default=True,
    ),
    TracePart(
        "annotations",
        "time by annotation",
        "use torch.profiler.record_function",
        "mark ranges of the program with torch.profiler.record_function, which costs little",
        _table("user_annotation"),
    ),
    TracePart(
        "synchronisations",
        "critical path",
        "record cuda_sync activities: _ExperimentalConfig(enable_cuda_sync_events=True)",
        f"{_TRACE} --activities …,cuda_sync, which slows every CUDA call",
        _table("cuda_sync"),
    ),
    TracePart(
        "allocations",
        "memory views",
        f"use {_PROFILER}(profile_memory=True)",
        f"{_TRACE} --memory",
        _table("cpu_instant_event"),
        option=f"{_TRACE} --memory",
        kinds=("cpu_instant_event",),
        request="profile_memory",
    ),
    TracePart(
        "arguments of collectives",
        "bandwidth and skew of collectives",
        "record_shapes=True, and a PyTorch that names collectives (2.2 or later)",
        f"{_OUR_OPS}, and a PyTorch that names collectives (2.2 or later)",
        _collectives,
        option=_DEFAULT,
        of=("kernel",),
        of_some=True,
    ),
    TracePart(
        "profiled ranges",
        "hardware counters with operators",
        "use CUPTI's range profiler",
        "kinetod does not record hardware counters",
        _ranges,
        of_some=True,
    ),
    TracePart(
        "rank",
        "views over several ranks",
        "start the job with torch.distributed; or name the rank",
        "start the job with torchrun or Slurm, whose variables state the rank",
        _rank,
    ),
)
