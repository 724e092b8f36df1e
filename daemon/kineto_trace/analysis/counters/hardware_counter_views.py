"""Views of hardware counters by GPU, kernel, operator, module, annotation, collective and step.

GPU activities are grouped by kernel name, operator, annotation, module or phase of a step.

Every activity has a group, since samples measure all of them: those outside any operator, say, are a group of their
own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.annotation_views import launch_annotations
from kineto_trace.analysis.counters.attribution import METHODS, DeviceCounters, Grouping, attribute
from kineto_trace.analysis.counters.sampled_counters import (
    NO_COUNTERS,
    NVLINK,
    PCIE,
    interval_means,
    left_out_note,
    sampled_counters,
)
from kineto_trace.analysis.host_time.step_phase_views import OTHER, STEP_PHASES, phase_times
from kineto_trace.arrays.intervals import containing
from kineto_trace.base.array_types import NOTHING, Ints
from kineto_trace.collectives.nccl import Collectives, bus_factor, collectives
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, ops, owners, step_names, steps, whole_steps
from kineto_trace.structure.module_calls import NO_MODULES, backward_roots, module_calls, module_name
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NO_WORK = "the trace has no GPU activity to attribute the samples to"
_COUNTER = columns(
    ("counter", "text", "", "what is measured; missing: no counter has a value here"),
    ("unit", "text", "", "unit of the value"),
    ("value", "float", "", "mean while it ran alone on the GPU; missing: see why"),
    ("error", "float", "", "95 % interval of the value, plus or minus, in the same unit"),
    ("residual", "float", "", "root-mean-square error of the model for the samples in which it ran"),
    (
        "method",
        "text",
        "",
        "direct: mean over samples in which nothing else ran; fit: least squares over samples shared with other work",
    ),
    ("why", "text", "", "why there is no value"),
)
_TIME = columns(
    ("device", "int", "", "GPU index in the process"),
    ("time_us", "float", "us", "sum of the durations of its GPU activities"),
    ("shared_pct", "float", "%", "share of that time in which other work ran as well; the value is for the rest"),
)
PATHS = 1024  # module paths; deeper modules count for the module around them
OUTSIDE = "unattributed work"
FORWARD, BACKWARD = "forward", "backward"
PHASES = (*STEP_PHASES, OTHER)
Devices = tuple[DeviceCounters, ...]
NO_LINKS = "NVLink and PCIe were not sampled; sample them with kinetoctl trace --counters=interconnect"
_LABELS = {"nvlink_received_gb_s": NVLINK[0], "nvlink_sent_gb_s": NVLINK[1], "pcie_read_gb_s": PCIE[0],
           "pcie_write_gb_s": PCIE[1]}  # fmt: skip
ALL, AVERAGE = "all", "average"
NO_STEPS = "the trace has no training steps with work on a sampled GPU"
_OF_PHASE = ("device", "time_us", "counter", "unit", "value", "error", "why")


@dataclass(frozen=True, slots=True)
class ModuleCounters:
    """The counters of modules.

    path, name, depth: of each place.

    Groups are places, followed by those of the backward. The last group is work outside all modules.
    """

    path: tuple[str, ...]
    name: tuple[str, ...]
    depth: Ints
    devices: Devices


class GpuSteps(NamedTuple):
    """Steps on one GPU (Unix ns): from the first activity that a step launched to that of the next step.

    The last one ends with its last activity. Steps without GPU work are left out.
    """

    number: Ints
    start: Ints
    end: Ints


@view(
    "gpu_counters",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("counter", "text", "", "what is measured; the same name for every vendor"),
        ("metric", "text", "", "the vendor's name for it"),
        ("unit", "text", "", "unit of the values; missing if they have none"),
        ("mean", "float", "", "mean over the sampled time of the trace"),
        ("p50", "float", "", "median of the samples"),
        ("p95", "float", "", "95th percentile of the samples"),
        ("max", "float", "", "largest sample"),
        ("samples", "int", "", "number of samples with a value in the trace's window"),
        ("sample_us", "float", "us", "median length of a sample"),
        ("unsampled_pct", "float", "%", "share of the trace's window without samples"),
    ),
    nothing=NO_COUNTERS,
)
def gpu_counters(context: Context) -> Answer:
    """Hardware counters by GPU: how busy its units, memory and links were, and how much of the time was sampled.

    Values are those of the whole GPU, whichever process used it. Samples without a value, or with an impossible one
    (percentages above 105, negative values), count as time without a sample.
    """
    low, high = context.trace.window_start_ns, context.trace.window_end_ns
    rows = []
    for track in context.get(sampled_counters):
        inside = (track.end > low) & (track.start < high)
        start, end = np.clip(track.start[inside], low, high), np.clip(track.end[inside], low, high)
        value, length = track.value[inside], (end - start).astype(np.float64)
        some = bool(len(value))
        p50, p95 = np.percentile(value, (50, 95)).tolist() if some else (None, None)
        rows.append(
            {
                "device": track.device,
                "counter": track.label,
                "metric": track.metric,
                "unit": track.unit or None,
                "mean": float(np.average(value, weights=length)) if some else None,
                "p50": p50,
                "p95": p95,
                "max": float(value.max()) if some else None,
                "samples": len(value),
                "sample_us": float(np.median(track.end - track.start)) / 1000 if len(track) else None,
                "unsampled_pct": 100 * (1 - float(length.sum()) / (high - low)) if high > low else None,
            }
        )
    return gpu_counters.answer(rows, left_out_note(context) if rows else ())


def counter_rows(found: DeviceCounters, row: int, wanted: str = "") -> Iterator[dict[str, Any]]:
    """Yields the counter columns of a group: one row for each counter with a value, or one row with the reason if none
    has.
    """
    about = {
        "device": found.device,
        "time_us": int(found.total_ns[row]) / 1000,
        "shared_pct": float(found.shared_pct[row]),
    }
    chosen = [at for at, track in enumerate(found.tracks) if wanted.casefold() in track.label.casefold()]
    stated = [at for at in chosen if not found.why[row, at]]
    nothing = {"unit": None, "value": None, "error": None, "residual": None, "method": METHODS[0]}
    for at in chosen if stated else []:
        track, told = found.tracks[at], at in stated
        yield {
            **about,
            **nothing,
            "counter": track.label,
            "unit": track.unit or None,
            "why": found.why[row, at] or None,
            **(_value(found, row, at) if told else {}),
        }
    if chosen and not stated:
        yield {**about, **nothing, "counter": None, "why": found.why[row, chosen[0]]}


def _value(found: DeviceCounters, row: int, at: int) -> dict[str, Any]:
    return {
        "value": float(found.value[row, at]),
        "error": float(found.error[row, at]),
        "residual": float(found.residual[row, at]),
        "method": METHODS[int(found.method[row, at])],
    }


def notes(context: Context) -> list[str]:
    """Returns the notes on counters that belong to GPU work."""
    if not context.get(sampled_counters):
        return [NO_COUNTERS]
    return [*left_out_note(context), *([] if len(context.get(gpu)) else [NO_WORK])]


def _named_rows(context: Context, found: Iterable[DeviceCounters], counter: str) -> list[dict[str, Any]]:
    """Returns the rows of groups whose numbers are strings. The last group is work without a name."""
    strings = context.trace.strings
    return [
        {"name": strings[group] if group < len(strings) else None, **each}
        for device in found
        for row, group in enumerate(device.group.tolist())
        for each in counter_rows(device, row, counter)
    ]


@view("kernel_counters", columns(("name", "text", "", "kernel, copy or fill")) + _TIME + _COUNTER, nothing=NO_COUNTERS)
def kernel_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by kernel: how each one uses the GPU's units and memory; longest total time first.

    Samples measure the whole GPU. Where a kernel ran alone for three samples or longer, the value is the time-weighted
    mean of the samples within it. Otherwise, each sample is modelled as the time-weighted mean of everything that ran
    in it, and least squares over all samples give the values (0 to 100 for percentages); idle time has a value of its
    own. A value is given only with enough evidence: the kernel ran alone for the length of at least 50 samples, its
    share of the samples varies independently of other work, the 95 % interval is at most ± 10 points, and the residual
    is at most 8 points (for counters other than percentages: per cent of their largest sample).

    Options:
    - counter: only counters whose names contain this text (case-insensitive).
    """
    rows = _named_rows(context, context.get(by_kernel), counter)
    return kernel_counters.answer(rows, notes(context))


@view(
    "op_counters",
    columns(
        ("name", "text", "", "operator, or the annotation around work without an operator; missing if there is neither")
    )
    + _TIME
    + _COUNTER,
    nothing=NO_COUNTERS,
)
def op_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by operator; GPU work belongs to operators as in the view kernels_by_op.

    Same rules and options as kernel_counters.
    """
    rows = _named_rows(context, context.get(by_op), counter)
    return op_counters.answer(rows, notes(context))


@view(
    "annotation_counters",
    columns(("name", "text", "", "innermost annotation around the launch; missing if there is none or it is a step"))
    + _TIME
    + _COUNTER,
    nothing=NO_COUNTERS,
)
def annotation_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by user annotation, for the GPU work launched in it, nested annotations excluded.

    Same rules and options as kernel_counters.
    """
    rows = _named_rows(context, context.get(by_annotation), counter)
    return annotation_counters.answer(rows, notes(context))


@view(
    "module_counters",
    columns(
        ("path", "text", "", "names of the modules from the outermost to this one, separated by /"),
        ("name", "text", "", "class of the module, and its number among the modules of that class"),
        ("depth", "int", "", "nesting depth; 0 is outermost"),
        ("part", "text", "", "forward: launched by its calls; backward: by the backward pass of its operators"),
    )
    + _TIME
    + _COUNTER,
    nothing=NO_COUNTERS,
)
def module_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by module (nn.Module), nested modules included, as in the view modules.

    Same rules and options as kernel_counters. For modules that run at the same time, the values cover only the time in
    which one of them ran alone.
    """
    found = context.get(by_module)
    count, rows = len(found.path), []
    for device in found.devices:
        for row, group in enumerate(device.group.tolist()):
            if group == 2 * count:
                continue
            at = group % count
            about = {
                "path": found.path[at],
                "name": found.name[at],
                "depth": int(found.depth[at]),
                "part": FORWARD if group < count else BACKWARD,
            }
            rows += [{**about, **each} for each in counter_rows(device, row, counter)]
    told = notes(context)
    if context.get(sampled_counters) and not count:
        told.append(NO_MODULES)
    return module_counters.answer(rows, told)


def by_kernel(context: Context) -> Devices:
    """Returns the counters of kernels, copies and fills by name: groups are numbers of strings."""
    return attribute(context, Grouping(context.get(gpu).name.astype(np.int64), context.trace.strings))


def by_op(context: Context) -> Devices:
    """Returns the counters of operators: groups are numbers of strings, followed by the group of work without an
    operator.
    """
    return attribute(context, _named(context, context.get(owners)))


def by_annotation(context: Context) -> Devices:
    """Returns the counters of annotations, as by_op does of operators. Steps do not count as annotations."""
    name = context.get(launch_annotations)
    is_step = np.append(context.get(step_names), False)
    return attribute(context, _named(context, np.where(is_step[name], NOTHING, name)))


def _named(context: Context, name: Ints) -> Grouping:
    strings = context.trace.strings
    return Grouping(np.where(name >= 0, name, len(strings)), (*strings, OUTSIDE))


def by_phase(context: Context) -> Devices:
    """Returns the counters of the phases of steps, by launch time of the work: groups are places in PHASES."""
    activity, called = context.get(gpu), context.get(calls)
    number = np.full(len(activity), PHASES.index(OTHER), np.int64)
    launched = np.flatnonzero(activity.call >= 0)
    moment = called.start[activity.call[launched]] if len(launched) else launched
    for place, times in reversed(list(enumerate(context.get(phase_times)))):
        number[launched[containing(times.start, times.end, moment) >= 0]] = place
    return attribute(context, Grouping(number, PHASES))


def by_module(context: Context) -> ModuleCounters:
    """Returns the counters of modules with those inside them, forward and backward apart."""
    found, activity = context.get(module_calls), context.get(gpu)
    first, parent = found.first, found.around
    depth = found.depth[first]
    deepest = next((limit for limit in range(int(depth.max(initial=0)), 0, -1)
                    if np.count_nonzero(depth <= limit) <= PATHS), 0)  # fmt: skip
    kept = int(np.count_nonzero(depth <= deepest))  # outer ones have lower numbers
    shown = np.arange(len(first))
    while (shown >= kept).any():
        shown = np.where(shown >= kept, parent[shown], shown)
    place = np.append(shown, NOTHING)[np.append(found.path, NOTHING)]
    forward, backward = place[found.activity], place[_of_backward(context)]
    number = np.select([forward >= 0, backward >= 0], [forward, kept + backward], 2 * kept)
    inside = np.eye(kept, dtype=np.bool_)
    for each in range(kept - 1, -1, -1):
        if parent[each] >= 0:
            inside[parent[each]] |= inside[each]
    sums = np.eye(2 * kept + 1, dtype=np.bool_)
    sums[:kept, :kept] = sums[kept:-1, kept:-1] = inside
    names = [module_name(context.trace.strings[at]) for at in found.name[first[:kept]].tolist()]
    texts: list[str] = []
    for each, outer in enumerate(parent[:kept].tolist()):
        texts.append(names[each] if outer < 0 else f"{texts[outer]}/{names[each]}")
    labels = (*texts, *(f"{text} (backward)" for text in texts), OUTSIDE)
    devices = attribute(context, Grouping(number.astype(np.int64), labels, sums)) if len(activity) else ()
    return ModuleCounters(tuple(texts), tuple(names), depth[:kept], devices)


def _of_backward(context: Context) -> Ints:
    """Returns for each GPU activity the module call (place in ModuleCalls) whose backward launched it, or NOTHING."""
    tree, called, activity = context.get(ops), context.get(module_calls), context.get(gpu)
    root, forward = backward_roots(context)
    module = np.full(len(tree.row) + 1, NOTHING, np.int64)
    if len(root):
        module[tree.place[root]] = called.op[forward]
    parent = tree.nested.tree.parent
    at = np.append(tree.place, NOTHING)[activity.op]
    while (waiting := np.flatnonzero((at >= 0) & (module[at] < 0))).size:
        at[waiting] = parent[at[waiting]]
    found: Ints = module[at]
    return found


@view(
    "collective_counters",
    columns(
        ("collective", "text", "", "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, …"),
        ("process_group", "text", "", "name of the process group"),
        ("group_size", "int", "", "number of ranks in the group"),
        ("bytes", "int", "bytes", "size of the larger of the rank's two buffers (nccl-tests' size)"),
        ("device", "int", "", "GPU index in the process"),
        ("calls", "int", "", "number of kernels"),
        ("time_us", "float", "us", "sum of their durations, waiting for other ranks included"),
        ("busbw_gb_s", "float", "GB/s", "bus bandwidth over that time (nccl-tests); missing: the size is unknown"),
        ("nvlink_received_gb_s", "float", "GB/s", "received over NVLink while they ran"),
        ("nvlink_sent_gb_s", "float", "GB/s", "sent over NVLink while they ran"),
        ("nvlink_pct", "float", "%", "nvlink_sent_gb_s as a share of busbw_gb_s"),
        ("pcie_read_gb_s", "float", "GB/s", "read over PCIe while they ran, by any work"),
        ("pcie_write_gb_s", "float", "GB/s", "written over PCIe while they ran, by any work"),
        ("why", "text", "", "why values are missing"),
    ),
    nothing=NO_COUNTERS,
)
def collective_counters(context: Context) -> Answer:
    """What the collectives of one rank move over NVLink and PCIe, and their bus bandwidth, by kind and size.

    Values are computed as in the view kernel_counters, but only collectives count as work, because other kernels hardly
    use NVLink. A ring sends about as many bytes over NVLink as the bus bandwidth implies (nvlink_pct near 100), an
    all_reduce inside the switch (NVLS) about half. If nvlink_pct is lower, the data goes over PCIe or the network, or
    ranks wait.
    """
    found, told = context.get(collectives), notes(context)
    sampled = {track.label for track in context.get(sampled_counters)}
    if sampled and not sampled & {*NVLINK, *PCIE}:
        told.append(NO_LINKS)
    rows = [] if NO_LINKS in told or not sampled else _rows(context, found)
    if not rows and not told:
        told.append("the trace has no collectives on a sampled GPU")
    return collective_counters.answer(rows, told)


def _rows(context: Context, found: Collectives) -> list[dict[str, Any]]:
    number = np.full(len(context.get(gpu)), -1, np.int64)
    number[found.place] = found.description
    names = [described.collective for described in found.descriptions]
    return [
        _row(context, found, number, device, row)
        for device in attribute(context, Grouping(number, names))
        for row in range(len(device.group))
    ]


def _row(context: Context, found: Collectives, number: Ints, device: DeviceCounters, row: int) -> dict[str, Any]:
    group = int(device.group[row])
    described, activity = found.descriptions[group], context.get(gpu)
    calls = int(np.count_nonzero((number == group) & (activity.device == device.device)))
    factor = bus_factor(described.collective, described.size) if described.size else float("nan")
    moved = float("nan") if described.bytes is None else described.bytes * calls * factor
    bus = moved / float(device.total_ns[row])  # bytes per ns are GB/s
    rates = {name: float(device.of(label)[row]) / 1e9 for name, label in _LABELS.items()}
    missing = [str(device.why[row, at]) for at, track in enumerate(device.tracks) if track.label in _LABELS.values()]
    return {
        "collective": described.collective,
        "process_group": described.group,
        "group_size": described.size,
        "bytes": described.bytes,
        "device": device.device,
        "calls": calls,
        "time_us": int(device.total_ns[row]) / 1000,
        "busbw_gb_s": bus,
        **rates,
        "nvlink_pct": 100 * rates["nvlink_sent_gb_s"] / bus if bus > 0 else None,
        "why": next(filter(None, missing), None),
    }


def gpu_steps(context: Context, device: int) -> GpuSteps:
    """Returns the completely recorded steps, or all steps if none is complete."""
    found = context.get(whole_steps)
    found = found if len(found) else context.get(steps)
    activity, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero((activity.device == device) & (activity.call >= 0))
    step = found.at(called.start[activity.call[rows]]) if len(found) and len(rows) else np.full(len(rows), -1)
    rows, step = rows[step >= 0], step[step >= 0]
    first = np.full(len(found), np.iinfo(np.int64).max)
    last = np.full(len(found), np.iinfo(np.int64).min)
    np.minimum.at(first, step, activity.start[rows])
    np.maximum.at(last, step, activity.end[rows])
    worked = np.flatnonzero(last >= first)
    start, end = first[worked], last[worked]
    following = np.flatnonzero(np.diff(found.number[worked]) == 1)  # skips steps that have another one between them
    end[following] = np.maximum(start[following + 1], start[following])
    return GpuSteps(found.number[worked], start, end)


@view(
    "step_counters",
    columns(
        ("step", "text", "", 'step number; "average": mean of all steps; "all": a phase, over all steps'),
        (
            "phase",
            "text",
            "",
            "phase that launched the work: loading, forward, backward, optimizer or other; missing: whole step",
        ),
        ("device", "int", "", "GPU index in the process"),
        (
            "time_us",
            "float",
            "us",
            "length of the step on the GPU, idle time included; for a phase, time of its GPU activities",
        ),
        ("counter", "text", "", "what is measured; missing: no counter has a value here"),
        ("unit", "text", "", "unit of the value"),
        ("value", "float", "", "mean over the step; for a phase, while its work ran alone on the GPU"),
        ("sampled_pct", "float", "%", "share of the step with samples; missing for phases"),
        ("error", "float", "", "for a phase: 95 % interval of the value, plus or minus; the value of a step is exact"),
        ("why", "text", "", "why there is no value"),
    ),
    nothing=NO_COUNTERS,
)
def step_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by training step and by phase of the steps.

    On the GPU, a step lasts from its first activity to the first activity of the next step, or to its own last activity
    if there is no next step. Its value is the mean over that time, exact except for the two samples at its ends. The
    mean of all steps comes first. A phase covers the GPU work launched in it; its values are determined as in the view
    kernel_counters.

    Options:
    - counter: only counters whose names contain this text (case-insensitive).
    """
    tracks = [track for track in context.get(sampled_counters) if counter.casefold() in track.label.casefold()]
    told, rows = notes(context), list[dict[str, Any]]()
    for track in tracks:
        found = context.get(_steps_by_device).get(track.device)
        if found is None or not len(found.number):
            continue
        count = len(found.number)
        each = interval_means(track, found.start, found.end, np.arange(count), count)
        whole = interval_means(track, found.start, found.end, np.zeros(count, np.int64), 1)
        took = np.append(found.end - found.start, (found.end - found.start).sum())
        names = [*map(str, found.number.tolist()), AVERAGE]
        mean, covered = np.append(each.mean, whole.mean), np.append(each.covered_ns, whole.covered_ns)
        for place, name in enumerate(names):
            rows.append(
                {
                    "step": name,
                    "phase": None,
                    "device": track.device,
                    "time_us": took[place] / (1000 * count if name == AVERAGE else 1000),
                    "counter": track.label,
                    "unit": track.unit or None,
                    "value": mean[place],
                    "sampled_pct": 100 * covered[place] / max(int(took[place]), 1),
                    "error": None,
                    "why": None if covered[place] else "no sample lies in the step",
                }
            )
    if tracks and not rows:
        told.append(NO_STEPS)
    means = [row for row in rows if row["step"] == AVERAGE]
    if tracks and len(context.get(steps)):
        means += _phases(context, counter)
    rows = means + sorted((row for row in rows if row["step"] != AVERAGE), key=lambda row: int(row["step"]))
    return step_counters.answer(rows, told)


def _steps_by_device(context: Context) -> dict[int, GpuSteps]:
    return {device: gpu_steps(context, device) for device in {track.device for track in context.get(sampled_counters)}}


def _phases(context: Context, counter: str) -> list[dict[str, Any]]:
    return [
        {"step": ALL, "phase": PHASES[group], "sampled_pct": None, **{key: each[key] for key in _OF_PHASE}}
        for device in context.get(by_phase)
        for row, group in enumerate(device.group.tolist())
        for each in counter_rows(device, row, counter)
    ]
