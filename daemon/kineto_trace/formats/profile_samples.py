"""A trace in the terms of profilers: stacks with values, and labels on them.

Theory of operation
    There are three subjects, each with value types of its own:

    - python: how often the stack sampler saw each line of a Python function, by state of its thread
    - host: self time of each operator, annotation and Python frame
    - gpu: kernels, copies and fills, each below the frames that launched it

    They are the stacks of the flame graphs (structure/call_forests.py), except for the thread, which is a label here:
    profilers add up threads, and their users filter by labels. Samples with the same stack, line and labels are merged.
    Times of overlapping GPU work add up.

    An annotation may name a span of distributed tracing (base/telemetry_ids.py). The work below it is linked to that
    span; the ids are then not part of the frame's name, which would otherwise differ for each request.

The process of a profile, by OpenTelemetry's semantic conventions; attributes without a convention begin with `kineto.`.

The process's own OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which the daemon reads with its environment, and a
capture's label `service.name` come first: the program's other telemetry is found by them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Ints
from kineto_trace.base.telemetry_ids import SERVICE_NAME, TRACE_PARENT, TraceContext, split_name
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import GPU_TABLES, Trace
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.call_forests import (
    IDLE_FOR,
    CallForest,
    StackKind,
    gpu_calls,
    host_calls,
    python_rows,
)
from kineto_trace.structure.library_calls import CodePlace, code_place
from kineto_trace.structure.nesting import stack_numbers
from kineto_trace.structure.python_frames import IDLE, RUNNING, UNKNOWN, WAITING, line_samples, sample_period_ns
from kineto_trace.structure.trace_forms import with_current_forms

THREAD_ID, THREAD_NAME, THREAD_STATE, WAITS_FOR = "thread_id", "thread_name", "thread_state", "waits_for"
GPU_ID, ACTIVITY = "gpu", "activity"
LABELS: Mapping[str, str] = {  # label of pprof -> attribute of OTLP
    THREAD_ID: "thread.id",
    THREAD_NAME: "thread.name",
    THREAD_STATE: "kineto.thread.state",
    WAITS_FOR: "kineto.thread.waits_for",
    GPU_ID: "kineto.gpu.id",
    ACTIVITY: "kineto.activity",
}
Labels = tuple[tuple[str, str | int], ...]
_REASONS = tuple(name.removeprefix("idle_") for name in IDLE_FOR)
LABEL_PREFIX = "kineto.label."
Value = str | int | Sequence[str]
# Attribute -> meaning. docs/profiles.md has this table, too.
ATTRIBUTES: Mapping[str, str] = {
    SERVICE_NAME: "label `service.name` of the capture, else OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES of the "
    "process, else its script or program",
    "host.name": "the host",
    "process.pid": "pid as the process itself sees it",
    "process.executable.name": "its program",
    "process.runtime.version": "its Python version",
    "container.id": "container of the process, from its control group",
    "k8s.pod.uid": "pod of the process, from its control group",
    "k8s.pod.name": "name of the pod in Kubernetes",
    "k8s.namespace.name": "namespace of the pod",
    "k8s.container.name": "name of the container in Kubernetes",
    "kineto.capture.id": "the capture",
    "kineto.job.id": "id of the batch job, for example in Slurm",
    "kineto.rank": "rank of the process in its job",
    "kineto.world_size": "number of ranks",
    "kineto.framework": 'framework and version, such as "torch 2.13.0"',
    "kineto.gpu.ids": "indexes of the GPUs that were used, as the process sees them",
    "kineto.gpu.models": "names of these GPUs, each once",
    f"{LABEL_PREFIX}NAME": f"each label of the capture; `{TRACE_PARENT}`: the trace context of the request for it",
}


class ProfileSubject(StrEnum):
    """The subject of samples."""

    PYTHON = "python"
    HOST = "host"
    GPU = "gpu"


class SampleType(NamedTuple):
    """A value that each sample of a subject has."""

    name: str
    unit: str  # "nanoseconds" or "count", as pprof spells them


SAMPLES = SampleType("samples", "count")
CPU = SampleType("cpu", "nanoseconds")
GIL_WAIT = SampleType("gil_wait", "nanoseconds")
IDLE_TIME = SampleType("idle", "nanoseconds")
WALL = SampleType("wall", "nanoseconds")
HOST_TIME = SampleType("host_time", "nanoseconds")
GPU_ACTIVITIES = SampleType("gpu_activities", "count")
GPU_TIME = SampleType("gpu_time", "nanoseconds")
SAMPLE_TYPES: Mapping[SampleType, str] = {
    SAMPLES: "samples of Python stacks, in any state of the thread",
    CPU: "time in samples whose thread ran, or was ready to run",
    GIL_WAIT: "time in samples whose thread waited for the GIL",
    IDLE_TIME: "time in samples whose thread was off the CPU for any other reason",
    WALL: "time in samples without a known thread state; present only if there are any",
    HOST_TIME: "self time of operators, annotations and Python frames",
    GPU_ACTIVITIES: "kernels, copies and fills",
    GPU_TIME: "time of kernels, copies and fills; overlapping times add up",
}
_BY_STATE = {RUNNING: CPU, WAITING: GIL_WAIT, IDLE: IDLE_TIME, UNKNOWN: WALL}


@dataclass(frozen=True, slots=True)
class ProfileFrame:
    """The function at a location of a profile. name: as in the trace. span: the span that the frame names, if any."""

    place: CodePlace
    name: str
    on_gpu: bool
    span: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class ProfileSamples:
    """The samples of one subject.

    parent, frame: of each distinct stack, the stack of its caller (or NOTHING) and the number of its innermost frame in
        `frames`.
    stack, line, labels, values: one row per sample; line: of the innermost frame, 0 if unknown; labels: number into
        label_sets; values: one column per type.
    span: of each stack, a number into `spans`; 0 for none.
    """

    subject: ProfileSubject
    types: tuple[SampleType, ...]
    frames: Mapping[int, ProfileFrame]
    parent: Ints
    frame: Ints
    span: Ints
    stack: Ints
    line: Ints
    labels: Ints
    values: Ints
    label_sets: Sequence[Labels]
    spans: Sequence[TraceContext | None]

    def __len__(self) -> int:
        return len(self.stack)

    def paths(self) -> Iterator[list[int]]:
        """Yields the frames of each sample, the innermost first."""
        parent, frame = self.parent.tolist(), self.frame.tolist()
        for stack in self.stack.tolist():
            found, at = [], stack
            while at >= 0:
                found.append(frame[at])
                at = parent[at]
            yield found

    def sample_spans(self, otherwise: TraceContext | None) -> list[TraceContext | None]:
        """Returns the span of each sample: that of its stack, or `otherwise`."""
        return [self.spans[number] or otherwise for number in self.span[self.stack].tolist()]


@dataclass(frozen=True, slots=True)
class Profile:
    """All subjects with samples in the trace. period_ns: of Python samples; 0 if unknown or none."""

    trace: Trace
    subjects: tuple[ProfileSamples, ...]
    period_ns: int
    parent_span: TraceContext | None  # in which the process was started

    @property
    def types(self) -> tuple[SampleType, ...]:
        """Returns the types of all subjects."""
        return tuple(entry for samples in self.subjects for entry in samples.types)

    @property
    def duration_ns(self) -> int:
        """Returns the length of the trace's window."""
        return max(0, self.trace.window_end_ns - self.trace.window_start_ns)


def profile(context: Context, *subjects: ProfileSubject) -> Profile:
    """Returns the samples of these subjects; without arguments, of all."""
    wanted = subjects or tuple(ProfileSubject)
    every = [_FOUND[subject](context) for subject in ProfileSubject if subject in wanted]
    found = tuple(samples for samples in every if len(samples))
    sampled = any(samples.subject is ProfileSubject.PYTHON for samples in found)
    return Profile(
        context.trace,
        found,
        sample_period_ns(context.trace) if sampled else 0,
        TraceContext.parse(context.trace.target.trace_parent),
    )


def _python(context: Context) -> ProfileSamples:
    trace, table = context.trace, context.trace.table("python_function")
    forest, places = python_rows(context)
    found, period = line_samples(trace), sample_period_ns(trace)
    entry, state = np.nonzero(found.counts > 0)
    row, count = found.row[entry], found.counts[entry, state]
    types = [SAMPLES]
    if period:
        types += [CPU, GIL_WAIT, IDLE_TIME, *([WALL] if (state == UNKNOWN).any() else [])]
    values = np.zeros((len(row), len(types)), np.int64)
    values[:, 0] = count
    for number, kind in _BY_STATE.items() if period else ():
        mine = np.flatnonzero(state == number)
        if len(mine):
            values[mine, types.index(kind)] = count[mine] * period
    waits = np.zeros(len(table), np.int64)
    for number, name in enumerate(IDLE_FOR, 1):
        waits[(table[name] > 0) & (table[name] == table[STATES[IDLE]])] = number
    states, reasons = [*STATES[:WAITING], "waiting for the GIL", *STATES[IDLE:]], ["", *_REASONS]
    return _merged(
        context,
        ProfileSubject.PYTHON,
        tuple(types),
        forest,
        places[row],
        values,
        line=found.line[entry],
        labels={
            THREAD_STATE: (state, states.__getitem__),
            WAITS_FOR: (np.where(state == IDLE, waits[row], 0), reasons.__getitem__),
        },
    )


def _host(context: Context) -> ProfileSamples:
    forest = host_calls(context.get(with_current_forms))
    nodes = np.flatnonzero((forest.own > 0) & (forest.kind != StackKind.THREAD))
    return _merged(context, ProfileSubject.HOST, (HOST_TIME,), forest, nodes, forest.own[nodes, np.newaxis])


def _gpu(context: Context) -> ProfileSamples:
    meant = context.get(with_current_forms)
    forest, work = gpu_calls(meant), meant.get(gpu)
    nodes = np.flatnonzero(forest.kind == StackKind.GPU)  # in the order of `work`
    values = np.column_stack([np.ones(len(nodes), np.int64), np.maximum(forest.own[nodes], 0)])
    categories = [meant.trace.category(name) for name in GPU_TABLES]
    return _merged(
        context,
        ProfileSubject.GPU,
        (GPU_ACTIVITIES, GPU_TIME),
        forest,
        nodes,
        values,
        labels={GPU_ID: (work.device, str), ACTIVITY: (work.kind.astype(np.int64), categories.__getitem__)},
    )


def _merged(
    context: Context,
    subject: ProfileSubject,
    types: tuple[SampleType, ...],
    forest: CallForest,
    nodes: Ints,
    values: Ints,
    *,
    line: Ints | None = None,
    labels: Mapping[str, tuple[Ints, Callable[[int], str]]] | None = None,
) -> ProfileSamples:
    """Returns the samples at these nodes, equal ones added up. labels: numbers, and their meanings."""
    parent = forest.parent.copy()
    below = np.flatnonzero(parent >= 0)
    parent[below[forest.kind[parent[below]] == StackKind.THREAD]] = NOTHING
    stack_of, above, frame = stack_numbers(parent, forest.frame * len(StackKind) + forest.kind, forest.depth)
    stack, lines = stack_of[nodes], np.zeros(len(nodes), np.int64) if line is None else line
    numbers = {name: column for name, (column, _) in (labels or {}).items()}
    sets = group([forest.thread[nodes], *numbers.values()])
    groups = group([stack, lines, sets.number])
    frames = _frames(forest, frame[_with_callers(stack, above)])
    spans, span = _spans(frames, above, frame)
    return ProfileSamples(
        subject,
        types,
        frames,
        above,
        frame,
        span,
        stack[groups.first],
        lines[groups.first],
        sets.number[groups.first],
        np.column_stack([groups.sums(values[:, place]) for place in range(len(types))]).astype(np.int64),
        [
            (
                *_thread(context.trace, int(forest.thread[nodes[row]])),
                *((name, text) for name, (column, text_of) in (labels or {}).items() if (text := text_of(column[row]))),
            )
            for row in sets.first.tolist()
        ],
        spans,
    )


def _thread(trace: Trace, tid: int) -> Labels:
    if tid == NOTHING:
        return ()
    name = trace.target.threads.get(tid, "")
    return ((THREAD_ID, tid), *(((THREAD_NAME, name),) if name else ()))


def _with_callers(stack: Ints, parent: Ints) -> Ints:
    """Returns these stacks and those of their callers."""
    used, at = np.zeros(len(parent), np.bool_), unique_values(stack)
    while len(at):
        used[at] = True
        at = unique_values(parent[at])
        at = at[at >= 0]
        at = at[~used[at]]
    return np.flatnonzero(used)


def _frames(forest: CallForest, frame: Ints) -> dict[int, ProfileFrame]:
    """Returns the meaning of each frame: a name as a call of one kind."""
    found = {}
    for number in unique_values(frame).tolist():
        name, kind = divmod(number, len(StackKind))
        text = forest.frames[name]
        if kind == StackKind.FUNCTION:
            found[number] = ProfileFrame(code_place(text), text, on_gpu=False)
        else:
            shown, span = split_name(text) if kind == StackKind.ANNOTATION else (text, None)
            found[number] = ProfileFrame(CodePlace("", shown, 0), shown, on_gpu=kind == StackKind.GPU, span=span)
    return found


def _spans(frames: Mapping[int, ProfileFrame], parent: Ints, frame: Ints) -> tuple[list[TraceContext | None], Ints]:
    """Returns the spans that frames name, none first, and for each stack the number of its innermost frame's span."""
    spans: list[TraceContext | None] = [None]
    number = {}
    for key, entry in frames.items():
        if entry.span is not None:
            number[key] = len(spans)
            spans.append(entry.span)
    found = np.zeros(len(parent), np.int64)
    if number:
        for stack, (above, own) in enumerate(zip(parent.tolist(), frame.tolist(), strict=True)):  # callers come first
            found[stack] = number.get(own, 0 if above < 0 else found[above])
    return spans, found


def resource_attributes(trace: Trace) -> dict[str, Value]:
    """Returns the attributes of the traced process, without unknown ones."""
    target = trace.target
    ids, models = _gpus(trace)
    known: dict[str, Value | None] = {
        **target.resource,
        SERVICE_NAME: target.labels.get(SERVICE_NAME) or target.resource.get(SERVICE_NAME) or _program(target),
        "host.name": target.host,
        "process.pid": target.pid,
        "process.executable.name": target.process_name,
        "process.runtime.version": target.python_version,
        "kineto.capture.id": target.capture_id,
        "kineto.job.id": target.job_id,
        "kineto.rank": target.rank,
        "kineto.world_size": target.world_size,
        "kineto.framework": target.framework,
        "kineto.gpu.ids": ids,
        "kineto.gpu.models": models,
        **{LABEL_PREFIX + name: text for name, text in target.labels.items() if name != SERVICE_NAME},
    }
    return {
        name: value
        for name, value in known.items()
        if value not in (None, "", []) and (name, value) != ("process.pid", 0)
    }


def _program(target: TargetInfo) -> str:
    """Returns the name of the script that Python runs, or of the program."""
    if target.python_version:
        script = next((each for each in target.command[1:] if each.endswith(".py")), "")
        module = target.command[2:3] if target.command[1:2] == ["-m"] else []
        if name := PurePath(script).name or next(iter(module), ""):
            return name
    return target.process_name or "unknown_service"  # OpenTelemetry's fallback


def _gpus(trace: Trace) -> tuple[list[str], list[str]]:
    """Returns the numbers of the GPUs that worked, and their names."""
    used = sorted({number for kind in GPU_TABLES for number in unique_values(trace.table(kind)["device"]).tolist()})
    names = {number: device.get("name") for number, device in trace.devices_by_number.items()}
    models = [name for device in used if isinstance(name := names.get(device), str) and name]
    return [str(device) for device in used], list(dict.fromkeys(models))


_FOUND: Mapping[ProfileSubject, Callable[[Context], ProfileSamples]] = {
    ProfileSubject.PYTHON: _python,
    ProfileSubject.HOST: _host,
    ProfileSubject.GPU: _gpu,
}
