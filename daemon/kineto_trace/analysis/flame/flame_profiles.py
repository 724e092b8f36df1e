"""The calls that a flame graph is of: Python, operators or GPU work, of one thread and step if wanted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.flame.flame_nodes import NS, SAMPLES
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.quantities import time_text
from kineto_trace.errors import ViewError
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import step_names, steps
from kineto_trace.structure.python.python_samples import sample_period_ns
from kineto_trace.structure.stacks.call_forests import (
    NOTHING,
    CallForest,
    StackKind,
    gpu_calls,
    module_calls_on_gpu,
    module_calls_on_host,
    operator_calls,
    python_calls,
    sampled_lines,
)
from kineto_trace.structure.steps.step_pace import paced_steps
from kineto_trace.structure.training_thread import training_thread

STEPS = STEP_PREFIX.removesuffix("#")
STEP, SECOND = "step", "second"
NO_IDLE = "samples of idle threads are left out"

OUTSIDE_MODULES = "{} of GPU time were launched outside of modules, as by the backward pass and the optimizer"
NS_PER_US = 1e3

Ints = npt.NDArray[np.int64]


class FlameSubject(StrEnum):
    """What a flame graph is of."""

    PYTHON = "python"
    OPS = "ops"
    KERNELS = "kernels"
    MODULES = "modules"  # by their time on the host
    MODULES_GPU = "modules_gpu"  # by the GPU time that was launched in them


GPU_SUBJECTS = (FlameSubject.KERNELS, FlameSubject.MODULES_GPU)  # in order of time: side by side, as launched

_ON_HOST: Mapping[FlameSubject, Callable[[Context], CallForest]] = {
    FlameSubject.OPS: operator_calls,
    FlameSubject.PYTHON: python_calls,
    FlameSubject.MODULES: module_calls_on_host,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameChoice:
    """Which calls are wanted. thread: id of the only one; step: number of the only one. None: all.

    idle: with samples in which a thread was off the CPU.
    """

    of: FlameSubject = FlameSubject.OPS
    thread: int | None = None
    step: int | None = None
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameProfile:
    """Calls with their own values. unit: NS or SAMPLES. start, end: the stretch of time (Unix ns) they are of.

    steps: how many it has, 0: unknown. notes: what is left out or assumed.
    """

    calls: CallForest
    unit: str
    start: int
    end: int
    steps: int
    notes: tuple[str, ...] = ()


def merged_profile(context: Context, choice: FlameChoice, *, whole_steps_only: bool = False) -> FlameProfile:
    """Returns the calls whose equal stacks are to be merged; training steps have one name.

    whole_steps_only: leaves what lies between the first measured step's start and the last one's end, if there are
    steps. Raises ViewError for a step that the trace does not have.
    """
    start, end, count = _stretch(context, choice.step, whole_steps_only)
    cut = choice.step is not None or (whole_steps_only and count > 0)
    found, unit, notes = _calls(context, choice, (start, end) if cut else None)
    names = np.append(context.get(step_names), np.zeros(len(found.frames) - len(context.trace.strings), np.bool_))
    same = np.where(names, len(found.frames), np.arange(len(names)))
    calls = replace(found, frame=same[found.frame], frames=[*found.frames, STEPS]) if len(found) else found
    return FlameProfile(
        calls=of_thread(calls, choice.thread), unit=unit, start=start, end=end, steps=count, notes=notes
    )


def timed_profile(context: Context, choice: FlameChoice) -> FlameProfile:
    """Returns calls in their order of time, with values in ns; Python and operators of one thread.

    Without a thread in the choice, that is the one that trains. Raises ViewError for a step that is not in the trace.
    """
    start, end, count = _stretch(context, choice.step, only_whole=False)
    if choice.of in GPU_SUBJECTS:
        found, unit, notes = _calls(context, choice, (start, end) if choice.step is not None else None)
        calls = of_thread(found, choice.thread)
        return FlameProfile(calls=calls, unit=unit, start=start, end=end, steps=count, notes=notes)
    calls = context.get(_ON_HOST[choice.of])
    thread = choice.thread if choice.thread is not None else _busiest(context, calls)
    calls = of_thread(calls, thread)
    inside = calls.kind != StackKind.THREAD
    if choice.step is None and inside.any():
        start, end = int(calls.start[inside].min()), int(calls.end[inside].max())
    return FlameProfile(calls=clipped(calls, start, end), unit=NS, start=start, end=end, steps=count)


def of_thread(calls: CallForest, thread: int | None) -> CallForest:
    """Returns the calls of one thread; all for None."""
    return calls if thread is None else chosen(calls, calls.thread == thread)


def chosen(calls: CallForest, kept: npt.NDArray[np.bool_]) -> CallForest:
    """Returns the calls that are kept; the callers of each must be among them."""
    place = np.append(np.cumsum(kept) - 1, NOTHING)
    columns = {name: getattr(calls, name)[kept] for name in ("frame", "kind", "own", "thread", "start", "end", "depth")}
    return replace(calls, parent=place[calls.parent[kept]], **columns)


def clipped(calls: CallForest, start: int, end: int) -> CallForest:
    """Returns what of calls with start and end lies between these moments (Unix ns); own values are what is left.

    That of a thread is the time in which it called nothing.
    """
    outermost = calls.kind == StackKind.THREAD
    begin = np.where(outermost, start, np.maximum(calls.start, start))
    stop = np.where(outermost, end, np.minimum(calls.end, end))
    found = chosen(replace(calls, start=begin, end=stop), stop > begin)
    width = found.end - found.start
    own = width.copy()
    inside = found.parent >= 0
    np.subtract.at(own, found.parent[inside], width[inside])
    return replace(found, own=own)


def _stretch(context: Context, step: int | None, only_whole: bool) -> tuple[int, int, int]:
    """Returns the stretch of time that is looked at, and the number of steps in it."""
    trace, found = context.trace, context.get(steps)
    if step is not None:
        rows = np.flatnonzero(found.number == step)
        if not len(rows):
            raise ViewError(f"the trace has no step {step}; there are: {', '.join(map(str, found.number.tolist()))}")
        return int(found.start[rows].min()), int(found.end[rows].max()), 1
    whole = context.get(paced_steps)
    if only_whole and len(whole):
        return int(whole.start.min()), int(whole.end.max()), len(unique_values(whole.number))
    return trace.window_start_ns, trace.window_end_ns, len(unique_values(found.number))


def _calls(
    context: Context, choice: FlameChoice, cut: tuple[int, int] | None
) -> tuple[CallForest, str, tuple[str, ...]]:
    """Returns all calls with their own values in the stretch of time (None: everywhere), their unit, and notes."""
    if choice.of is FlameSubject.MODULES_GPU:
        calls, outside = module_calls_on_gpu(context, cut)
        return calls, NS, (OUTSIDE_MODULES.format(time_text(outside / NS_PER_US)),) if outside else ()
    if choice.of is FlameSubject.KERNELS:
        calls = context.get(gpu_calls)
        inside = (calls.start >= cut[0]) & (calls.start < cut[1]) if cut else True
        return replace(calls, own=np.where(inside, calls.own, 0)), NS, ()
    if choice.of is FlameSubject.PYTHON and len(lines := context.get(sampled_lines)):
        return _samples(context, lines, cut, idle=choice.idle)
    calls = context.get(_ON_HOST[choice.of])
    return clipped(calls, *cut) if cut else calls, NS, ()


def _samples(
    context: Context, calls: CallForest, cut: tuple[int, int] | None, *, idle: bool
) -> tuple[CallForest, str, tuple[str, ...]]:
    own, notes = calls.own, []
    if not idle and (left := int(own[calls.kind == StackKind.IDLE].sum())):
        own = np.where(calls.kind == StackKind.IDLE, 0, own)
        notes.append(f"{left:,} {NO_IDLE}")
    period = sample_period_ns(context.trace)
    own = own * (period or 1)
    if cut:
        length = np.maximum(calls.end - calls.start, 1)
        inside = np.clip(np.minimum(calls.end, cut[1]) - np.maximum(calls.start, cut[0]), 0, length)
        own = (own * (inside / length)).astype(np.int64)
        notes.append("samples of frames that run beyond the step count in proportion to their time in it")
    return replace(calls, own=own), NS if period else SAMPLES, tuple(notes)


def _busiest(context: Context, calls: CallForest) -> int:
    """Returns the thread that trains, or if it has no calls, the one with most of them."""
    trains = context.get(training_thread)
    if not len(calls) or (calls.thread == trains).any():
        return trains
    ids, place = np.unique(calls.thread, return_inverse=True)
    return int(ids[np.argmax(np.bincount(place.reshape(-1), weights=calls.own))])
