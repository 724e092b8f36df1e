"""The view of merged stacks, and the flame graph of one trace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from kineto_trace.analysis.flame_trees import NS, OTHERS, ROOT, SAMPLES, FlameTree, merged_tree
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import NOTHING, Flags, Ints
from kineto_trace.base.quantities import format_duration
from kineto_trace.errors import ViewError
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import step_names, steps, training_thread
from kineto_trace.structure.call_forests import (
    CallForest,
    StackKind,
    gpu_calls,
    module_calls_on_gpu,
    module_calls_on_host,
    operator_calls,
    python_calls,
    sampled_lines,
)
from kineto_trace.structure.module_calls import ELIDED, NAME_BYTES, NO_MODULES, chain_bytes
from kineto_trace.structure.python_frames import sample_period_ns
from kineto_trace.structure.step_pace import paced_steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NS_PER_US = 1e3
STEPS = STEP_PREFIX.removesuffix("#")
STEP, SECOND = "step", "second"
NO_IDLE = "samples of idle threads are left out"
OUTSIDE_MODULES = (
    "{} of GPU time comes from work launched outside any module, for example by the backward pass or the optimizer"
)


class FlameSubject(StrEnum):
    """What a flame graph shows."""

    PYTHON = "python"
    OPS = "ops"
    KERNELS = "kernels"
    MODULES = "modules"  # by their time on the host
    MODULES_GPU = "modules_gpu"  # by the GPU time that was launched in them


NOTHING_OF = {
    FlameSubject.PYTHON: "the trace has no Python calls and no samples of Python stacks",
    FlameSubject.OPS: "the trace has no operators and no annotations",
    FlameSubject.KERNELS: "the trace has no GPU work",
    FlameSubject.MODULES: NO_MODULES,
    FlameSubject.MODULES_GPU: (
        "no GPU work was launched in modules; to record module calls, use with_modules=True or with_stack=True"
    ),
}
GPU_SUBJECTS = (FlameSubject.KERNELS, FlameSubject.MODULES_GPU)  # in order of time: side by side, as launched
_ON_HOST: Mapping[FlameSubject, Callable[[Context], CallForest]] = {
    FlameSubject.OPS: operator_calls,
    FlameSubject.PYTHON: python_calls,
    FlameSubject.MODULES: module_calls_on_host,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameChoice:
    """Which calls to include; None for all.

    thread: id of the only thread.
    step: number of the only step.
    idle: with samples in which a thread was off the CPU.
    """

    of: FlameSubject = FlameSubject.OPS
    thread: int | None = None
    step: int | None = None
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameProfile:
    """Calls with their own values.

    unit: NS or SAMPLES.
    start, end: the span of time (Unix ns) that they cover.
    steps: number of steps in it; 0 if unknown.
    notes: what is left out or assumed.
    """

    calls: CallForest
    unit: str
    start: int
    end: int
    steps: int
    notes: tuple[str, ...] = ()


@view(
    "flame_graph",
    columns(
        ("stack", "texts", "", "frames from the outermost to the innermost; the first is the thread"),
        ("name", "text", "", "the innermost frame: operator, annotation, Python function, line, module or kernel"),
        ("kind", "text", "", "what it is: function, annotation, operator, module, gpu, waiting (for the GIL) or idle"),
        ("self_us", "float", "us", "time spent in exactly this stack; missing if only samples are known"),
        ("self_pct", "float", "%", "share of the time or samples of all stacks"),
        ("samples", "int", "", "number of samples with exactly this stack; missing if its time is known"),
        ("stacks", "int", "", "number of stacks in this row"),
    ),
)
def flame_graph(
    context: Context,
    *,
    of: FlameSubject = FlameSubject.OPS,
    thread: int | None = None,
    step: int | None = None,
    idle: bool = False,
    least: float = 0.0,
) -> Answer:
    """Merged stacks, as flame graphs draw them: equal stacks form one row, and those with the most time come first.

    Time is counted once: the time of a frame's callees is in the rows of their stacks, so the rows sum to 100 %. All
    training steps share the name "ProfilerStep".

    Options:
    - of: "ops" for operators and annotations by their time on the host; "python" for Python functions, by samples and
      line where stacks were sampled, otherwise by the time of calls; "kernels" for GPU work below the frames that
      launched it; "modules" for modules by their time on the host, "modules_gpu" by the GPU time launched in them.
    - thread: id of the only thread to include; for kernels, the thread that launched them.
    - step: number of the only step to include (N of ProfilerStep#N); kernels belong to the step of their launch.
    - idle: also count samples in which a thread was idle.
    - least: stacks with less than this share (in %) are combined into one row.
    """
    choice = FlameChoice(of=FlameSubject(of), thread=thread, step=step, idle=idle)
    profile = merged_profile(context, choice)
    tree = merged_tree([profile.calls])
    whole = int(tree.total[ROOT])
    shown = np.flatnonzero((tree.own > 0) & (tree.own * 100 >= least * whole))
    shown = shown[np.argsort(-tree.own[shown], kind="stable")]
    others = np.flatnonzero((tree.own > 0) & (tree.own * 100 < least * whole))
    values = _values(tree, shown, tree.own[shown], profile.unit)
    if len(others):
        rest = _values(tree, others[:1], tree.own[others].sum(keepdims=True), profile.unit)
        rest |= {"stack": [[OTHERS]], "name": [OTHERS], "kind": [None], "stacks": [len(others)]}
        values = {name: [*column, *rest[name]] for name, column in values.items()}
    return Answer(values, profile.notes if whole else [*profile.notes, NOTHING_OF[choice.of]])


def _values(tree: FlameTree, places: Ints, own: Ints, unit: str) -> dict[str, Any]:
    whole = max(int(tree.total[ROOT]), 1)
    nothing = [None] * len(places)
    room = chain_bytes(len(places))
    return {
        "stack": [_stack(tree, place, room) for place in places.tolist()],
        "name": [tree.name(place) for place in places.tolist()],
        "kind": [StackKind(kind).name.lower() for kind in tree.kind[places].tolist()],
        "self_us": (own / NS_PER_US).tolist() if unit == NS else nothing,
        "self_pct": (100 * own / whole).tolist(),
        "samples": nothing if unit == NS else own.tolist(),
        "stacks": [1] * len(places),
    }


def _stack(tree: FlameTree, place: int, room: int) -> list[str]:
    """Returns the names down to this one; only the inner ones if all take more bytes than `room`."""
    names = []
    while place != ROOT:
        name = ELIDED if room <= 0 else tree.name(place)
        names.append(name)
        if room <= 0:
            break
        room -= NAME_BYTES + len(name)
        place = int(tree.parent[place])
    return names[::-1]


def merged_profile(context: Context, choice: FlameChoice, *, whole_steps_only: bool = False) -> FlameProfile:
    """Returns the calls whose equal stacks are to be merged; training steps have one name.

    whole_steps_only: keeps only what lies between the first measured step's start and the last one's end, if there are
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

    Without a thread in the choice, it is the training thread. Raises ViewError for a step that is not in the trace.
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
    return FlameProfile(calls=clip_calls(calls, start, end), unit=NS, start=start, end=end, steps=count)


def of_thread(calls: CallForest, thread: int | None) -> CallForest:
    """Returns the calls of one thread; all for None."""
    return calls if thread is None else select_calls(calls, calls.thread == thread)


def select_calls(calls: CallForest, kept: Flags) -> CallForest:
    """Returns the calls that are kept; the callers of each must be among them."""
    place = np.append(np.cumsum(kept) - 1, NOTHING)
    columns = {name: getattr(calls, name)[kept] for name in ("frame", "kind", "own", "thread", "start", "end", "depth")}
    return replace(calls, parent=place[calls.parent[kept]], **columns)


def clip_calls(calls: CallForest, start: int, end: int) -> CallForest:
    """Clips calls with start and end to these moments (Unix ns); own values are what is left.

    That of a thread is the time in which it called nothing.
    """
    outermost = calls.kind == StackKind.THREAD
    begin = np.where(outermost, start, np.maximum(calls.start, start))
    stop = np.where(outermost, end, np.minimum(calls.end, end))
    found = select_calls(replace(calls, start=begin, end=stop), stop > begin)
    width = found.end - found.start
    own = width.copy()
    inside = found.parent >= 0
    np.subtract.at(own, found.parent[inside], width[inside])
    return replace(found, own=own)


def _stretch(context: Context, step: int | None, only_whole: bool) -> tuple[int, int, int]:
    """Returns the selected span of time, and the number of steps in it."""
    trace, found = context.trace, context.get(steps)
    if step is not None:
        rows = np.flatnonzero(found.number == step)
        if not len(rows):
            known = ", ".join(map(str, found.number.tolist())) or "none"
            raise ViewError(f"the trace has no step {step}; its steps: {known}")
        return int(found.start[rows].min()), int(found.end[rows].max()), 1
    whole = context.get(paced_steps)
    if only_whole and len(whole):
        return int(whole.start.min()), int(whole.end.max()), len(unique_values(whole.number))
    return trace.window_start_ns, trace.window_end_ns, len(unique_values(found.number))


def _calls(
    context: Context, choice: FlameChoice, cut: tuple[int, int] | None
) -> tuple[CallForest, str, tuple[str, ...]]:
    """Returns all calls with their own values in the span of time (None: everywhere), their unit, and notes."""
    if choice.of is FlameSubject.MODULES_GPU:
        calls, outside = module_calls_on_gpu(context, cut)
        return calls, NS, (OUTSIDE_MODULES.format(format_duration(outside)),) if outside else ()
    if choice.of is FlameSubject.KERNELS:
        calls = context.get(gpu_calls)
        inside = (calls.start >= cut[0]) & (calls.start < cut[1]) if cut else True
        return replace(calls, own=np.where(inside, calls.own, 0)), NS, ()
    if choice.of is FlameSubject.PYTHON and len(lines := context.get(sampled_lines)):
        return _samples(context, lines, cut, idle=choice.idle)
    calls = context.get(_ON_HOST[choice.of])
    return clip_calls(calls, *cut) if cut else calls, NS, ()


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
        notes.append("if a frame extends beyond the step, its samples count in proportion to its time in the step")
    return replace(calls, own=own), NS if period else SAMPLES, tuple(notes)


def _busiest(context: Context, calls: CallForest) -> int:
    """Returns the training thread, or the one with most calls if it has none."""
    trains = context.get(training_thread)
    if not len(calls) or (calls.thread == trains).any():
        return trains
    ids, place = np.unique(calls.thread, return_inverse=True)
    return int(ids[np.argmax(np.bincount(place.reshape(-1), weights=calls.own))])
