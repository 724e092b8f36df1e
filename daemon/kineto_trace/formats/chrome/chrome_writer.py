"""Writes Kineto's Chrome-trace JSON from columns, in the form that HTA, the TensorBoard plug-in and Perfetto read.

Theory of operation
    The file consists of a header (device properties, versions, base of all times), rows that name processes and
    threads, one section of rows per kind of activity, and the closing rows. The order within a section is free. Each
    section goes through the native writer block by block, so that memory does not grow with the trace.

    Times are microseconds since a base that all files of a three-month period share (Kineto's "trimonth"), so that
    files of several ranks can be combined.
"""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_agent import __version__

from kineto_trace.arrays.codec import PreparedTexts, RowWriter
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.formats.chrome import metadata_events
from kineto_trace.formats.chrome.chrome_fields import FieldNames
from kineto_trace.formats.chrome.chrome_sections import Section, sections
from kineto_trace.formats.chrome.counter_tracks import CounterTrack, hardware_tracks, write_counters
from kineto_trace.formats.chrome.verbatim_writer import is_verbatim, write_rows, write_verbatim
from kineto_trace.formats.shared.launch_shape_texts import LaunchShapes
from kineto_trace.formats.shared.text_sinks import TextSink, escaped, name_text
from kineto_trace.model.activity_table import OWN_ROWS, arguments_of
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import NO_STRING, OP_TABLES, Trace, own_tables

TRIMONTH_NS = 7_889_238 * 1_000_000_000
# Kineto's keys (1, or absent) and the options that each stands for
OPTION_KEYS = {
    "record_shapes": ("record_shapes",),
    "with_stack": ("with_stack", "stack_trace"),
    "profile_memory": ("profile_memory",),
    "with_flops": ("with_flops",),
    "with_modules": ("with_modules",),
}
LOSS_KEYS = {  # of Losses -> ours
    "dropped": "records_dropped",
    "undecoded": "records_undecoded",
    "torn": "chunks_torn",
    "out_of_window": "records_out_of_window",
}
BLOCK_ROWS = 64 * 1024


def base_ns(time_ns: int) -> int:
    """Returns Kineto's baseTimeNanoseconds for a trace of this time."""
    return time_ns // TRIMONTH_NS * TRIMONTH_NS


def write_chrome(trace: Trace, sink: TextSink, *, trace_name: str, tracks: Sequence[CounterTrack] = ()) -> None:
    """Writes the whole file into the sink. trace_name: the file's name, which the file contains.

    A trace that was read from a Chrome trace is written back as it was, with its own name. tracks: counters that are
    not in the trace.
    """
    if is_verbatim(trace):
        write_verbatim(trace, sink, tracks)
        return
    base = base_ns(trace.window_start_ns)
    arguments = _arguments(trace)
    names = FieldNames(
        texts=PreparedTexts(
            [b"" if ready else name_text(text) for text, ready in zip(trace.strings, arguments, strict=True)]
        ),
        arguments=PreparedTexts(
            [
                b"," + text.encode("utf-8", "replace") if ready else b""
                for text, ready in zip(trace.strings, arguments, strict=True)
            ]
        ),
        lines=_as_argument(trace, "lines", trace.table("python_function")["lines"]),
        callees=_as_argument(trace, "callees", trace.table("python_function")["callees"]),
        captured=_as_argument(trace, "captured op", trace.table("graph_op")["name"]),
        base_ns=base,
        pid=trace.target.pid,
        shapes=LaunchShapes(trace.devices),
        categories=trace.categories,
        own=_own_texts(trace),
    )
    parts = sections(trace)
    sink.text(_header(trace, base))
    for row in metadata_events.rows(trace, parts, base):
        sink.text(row + b",\n")
    for part in parts:
        _write_section(part, names, sink)
    write_rows(trace, [table for table in (trace.table("other"),) if table.origin], base, sink)
    write_counters(chain(hardware_tracks(trace), tracks), trace, base, sink)
    sink.text(b",\n".join(metadata_events.closing_rows(trace, base)))
    sink.text(b'\n],\n"traceName": %s\n}\n' % json.dumps(trace_name).encode())


def _arguments(trace: Trace) -> list[bool]:
    """Tells for each string whether it consists of ready-made arguments (inputs of an operator, HLO of a kernel)."""
    ready = np.zeros(len(trace.strings), np.bool_)
    for numbers in (*(trace.table(kind)["inputs"] for kind in OP_TABLES), trace.table("kernel")["hlo"]):
        ready[numbers[numbers != NO_STRING]] = True
    return [bool(value) for value in ready.tolist()]


def _as_argument(trace: Trace, key: str, numbers: npt.NDArray[np.int32]) -> PreparedTexts:
    """Returns each of these strings as an argument with a leading comma; nothing for the other strings."""
    texts = [b""] * len(trace.strings)
    for number in unique_values(numbers[numbers != NO_STRING]).tolist():
        texts[number] = b',"%s":"%s"' % (key.encode(), escaped(trace.strings[number]))
    return PreparedTexts(texts)


def _own_texts(trace: Trace) -> dict[tuple[str, str], PreparedTexts]:
    """Returns the texts in the columns of tables that the trace declares itself, as arguments."""
    own = [trace.table(kind) for kind in own_tables(trace.tables, *OWN_ROWS)]
    return {
        (table.kind, column.name): _as_argument(trace, column.name, table[column.name])
        for table in own
        if table.declared is not None
        for column in arguments_of(table.declared)
        if column.text
    }


def head_texts(trace: Trace, base: int) -> dict[str, str]:
    """Returns the members of the file other than its events, each as JSON text."""
    target = trace.target
    values: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": list(trace.devices), "host_name": target.host}
    values.update((key, 1) for key, names in OPTION_KEYS.items() if any(map(target.options.get, names)))
    values.update((name, trace.versions[name]) for name in sorted(trace.versions))
    if target.rank is not None:
        distributed = {"backend": "unknown", "rank": target.rank, "world_size": target.world_size}
        values["distributedInfo"] = {name: value for name, value in distributed.items() if value is not None}
    values["kinetod"] = {
        "version": __version__,
        "capture_id": target.capture_id,
        **({"command": target.command} if target.command else {}),
        **({"job_id": target.job_id} if target.job_id else {}),
        "framework": target.framework,
        "python_version": target.python_version,
        "labels": target.labels,
        **({"resource": target.resource} if target.resource else {}),
        **({"trace_parent": target.trace_parent} if target.trace_parent else {}),
        "complete": target.complete,
        **{key: getattr(trace.losses, name) for name, key in LOSS_KEYS.items()},
        "coverage": [each.to_json(trace.category) for each in trace.coverage],
        **_stack_samples(trace),
        **({"kernel_counters": target.kernel_counters} if target.kernel_counters else {}),
        **({"settings": target.settings} if target.settings else {}),
        **({"step_ratio": target.step_ratio} if target.step_ratio else {}),
        **({"least_step_ratio": target.least_step_ratio} if target.least_step_ratio else {}),
        **_requested(target),
        **_clock(target),
    }
    values["displayTimeUnit"] = "ms"
    values["baseTimeNanoseconds"] = base
    # HTA finds the rank by a pattern that requires the space after the colon, so the separators matter.
    return {name: json.dumps(value, separators=(", ", ": ")) for name, value in values.items()}


def _stack_samples(trace: Trace) -> dict[str, Any]:
    """Returns what each sampled thread did, and the sampling period."""
    if not trace.target.thread_use:
        return {}
    return {"sample_period_ns": trace.sample_period_ns, "threads": trace.target.thread_use}


def _requested(target: TargetInfo) -> dict[str, Any]:
    """Returns the requested activity types, and why some could not be recorded."""
    requested = {} if target.activity_types is None else {"activity_types": target.activity_types}
    return {**requested, **({"not_recorded": target.not_recorded} if target.not_recorded else {})}


def _clock(target: TargetInfo) -> dict[str, int]:
    """Returns the measured offset and uncertainty of the host's clock."""
    if target.clock_offset_ns is None:
        return {}
    if target.clock_uncertainty_ns is None:
        return {"clock_offset_ns": target.clock_offset_ns}
    return {"clock_offset_ns": target.clock_offset_ns, "clock_uncertainty_ns": target.clock_uncertainty_ns}


def _header(trace: Trace, base: int) -> bytes:
    lines = [f"{json.dumps(name)}: {text}" for name, text in head_texts(trace, base).items()]
    return ("{\n" + ",\n".join(lines) + ',\n"traceEvents": [\n').encode()


def _write_section(section: Section, names: FieldNames, sink: TextSink) -> None:
    for first in range(0, section.count, BLOCK_ROWS):
        block = section.block(first, min(first + BLOCK_ROWS, section.count))
        sink.rows(RowWriter(section.render(block, names)), len(block["start"]))
