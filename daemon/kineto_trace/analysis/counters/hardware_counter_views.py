"""The views of hardware counters: of each GPU, and of kernels, operators, annotations, modules and steps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kineto_trace.analysis.counters.attribution import METHODS, DeviceCounters
from kineto_trace.analysis.counters.groupings import BACKWARD, FORWARD, by_annotation, by_kernel, by_module, by_op
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS, left_out_note, sampled_counters
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.module_calls import NO_MODULES
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, View, view

NO_WORK = "the trace has no GPU activity that samples could belong to"

_COUNTER = columns(
    ("counter", "text", "", "what is measured; missing: no counter has a value here"),
    ("unit", "text", "", "of the value"),
    ("value", "float", "", "mean while it ran alone on the GPU; missing: samples do not tell it"),
    ("error", "float", "", "95 % interval of the value, plus or minus, in the same unit"),
    ("residual", "float", "", "what the values of all that ran leave of a sample that it ran in, root mean square"),
    (
        "method",
        "text",
        "",
        "direct: mean over samples in which nothing else ran; fit: least squares over samples that others ran in, too",
    ),
    ("why", "text", "", "why there is no value"),
)
_TIME = columns(
    ("device", "int", "", "GPU index in the process"),
    ("time_us", "float", "us", "sum of the durations of its GPU activities"),
    ("shared_pct", "float", "%", "how much of that other work ran as well; the value is that of the rest"),
)


@view(
    "gpu_counters",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("counter", "text", "", "what is measured, in the same words for every vendor"),
        ("metric", "text", "", "the vendor's name of it"),
        ("unit", "text", "", "of the values; missing: it has none"),
        ("mean", "float", "", "mean over the sampled time of the trace"),
        ("p50", "float", "", "median of the samples"),
        ("p95", "float", "", "95th percentile of the samples"),
        ("max", "float", "", "largest sample"),
        ("samples", "int", "", "number of samples with a value in the trace's window"),
        ("sample_us", "float", "us", "median length of a sample"),
        ("unsampled_pct", "float", "%", "time of the trace's window without a sample"),
    ),
    nothing=NO_COUNTERS,
)
def gpu_counters(context: Context) -> Answer:
    """Hardware counters by GPU: how busy its units, memory and links were, and how much of the time was sampled.

    Values are those of the whole GPU, whoever used it. Samples without a value, and those that cannot be (percentages
    above 105, negative ones), count as time without a sample.
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
    return Answer(as_columns(gpu_counters, rows), left_out_note(context) if rows else ())


def as_columns(of: View, rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns the columns of a view from its rows."""
    return {column.name: [row[column.name] for row in rows] for column in of.columns}


def counter_rows(found: DeviceCounters, row: int, wanted: str = "") -> Iterator[dict[str, Any]]:
    """Yields the columns about counters for a group: one for each that has a value, or one that says why none has."""
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
    """Returns what is to be said of counters that belong to GPU work."""
    if not context.get(sampled_counters):
        return [NO_COUNTERS]
    return [*left_out_note(context), *([] if len(context.get(gpu)) else [NO_WORK])]


def _named_rows(context: Context, found: Iterable[DeviceCounters], counter: str) -> list[dict[str, Any]]:
    """The rows of groups that are numbers of strings. The last group is what has no name."""
    strings = context.trace.strings
    return [
        {"name": strings[group] if group < len(strings) else None, **each}
        for device in found
        for row, group in enumerate(device.group.tolist())
        for each in counter_rows(device, row, counter)
    ]


@view("kernel_counters", columns(("name", "text", "", "kernel, copy or fill")) + _TIME + _COUNTER, nothing=NO_COUNTERS)
def kernel_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by kernel: what each one makes of the GPU's units and memory, those with the most time first.

    Samples are of the whole GPU. Where it ran alone for three samples or longer the value is the mean, by time, of
    those that lie in it. Otherwise a sample is taken as the mean of what ran in it, by its share of the time, and least
    squares over all samples give the values, 0 to 100 for percentages; idle time has one of its own. A value is stated
    only with enough evidence: 50 samples' length alone, a share of the samples that differs from that of anything else,
    a 95 % interval of at most plus or minus 10 points, and a residual of at most 8 points (of what is no percentage,
    per cent of its largest sample).

    Options:
    - counter: only counters whose name contains this text, in any case.
    """
    rows = _named_rows(context, context.get(by_kernel), counter)
    return Answer(as_columns(kernel_counters, rows), notes(context))


@view(
    "op_counters",
    columns(("name", "text", "", "operator, or annotation around work without one; missing: neither"))
    + _TIME
    + _COUNTER,
    nothing=NO_COUNTERS,
)
def op_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by operator: of the GPU work that belongs to it, as in the view kernels_by_op.

    The rules and options are those of kernel_counters.
    """
    rows = _named_rows(context, context.get(by_op), counter)
    return Answer(as_columns(op_counters, rows), notes(context))


@view(
    "annotation_counters",
    columns(("name", "text", "", "innermost annotation around the launch; missing: none but steps")) + _TIME + _COUNTER,
    nothing=NO_COUNTERS,
)
def annotation_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by user annotation: of the GPU work that was launched in it and in none inside of it.

    The rules and options are those of kernel_counters.
    """
    rows = _named_rows(context, context.get(by_annotation), counter)
    return Answer(as_columns(annotation_counters, rows), notes(context))


@view(
    "module_counters",
    columns(
        ("path", "text", "", "names of the modules from the outermost to this one, separated by /"),
        ("name", "text", "", "the module's class, and its number among the modules of this class"),
        ("depth", "int", "", "nesting depth; 0 is outermost"),
        ("part", "text", "", "forward: what its calls launched; backward: what its operators' backward launched"),
    )
    + _TIME
    + _COUNTER,
    nothing=NO_COUNTERS,
)
def module_counters(context: Context, *, counter: str = "") -> Answer:
    """Hardware counters by module (nn.Module), each with the modules inside, as in the view modules.

    The rules and options are those of kernel_counters. A value of modules that run side by side is that of the time in
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
    return Answer(as_columns(module_counters, rows), told)
