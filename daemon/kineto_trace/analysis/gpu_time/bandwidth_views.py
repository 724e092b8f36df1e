"""Bandwidth of copies and fills over time."""

from kineto_trace.analysis.gpu_time.copy_bandwidth import Bandwidths, bandwidths
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.value_statistics import describe, statistics_columns
from kineto_trace.view_api.view import Answer, view

_NO_COPIES = "the trace has no copies or fills that state their size"
_SERIES = columns(
    ("device", "int", "", "GPU index in the process; missing with compat=hta"),
    ("kind", "text", "", "Memcpy HtoD, Memcpy DtoH, Memcpy DtoD, Memset, …"),
)


@view(
    "memory_bandwidth",
    _SERIES
    + columns(
        ("time_ns", "int", "ns", "Unix time of the change"),
        ("time_us", "float", "us", "the same, relative to the beginning of the trace"),
        ("bandwidth", "float", "GB/s", "from this time on: sum over all running copies and fills"),
    ),
    nothing=_NO_COPIES,
)
def memory_bandwidth(context: Context) -> Answer:
    """The bandwidth of copies and fills by kind, at every change. Memory traffic of kernels is not included.

    While a copy runs, it counts with its bytes divided by its duration; simultaneous copies add up.
    """
    return bandwidth_columns(context.get(bandwidths))


def bandwidth_columns(found: Bandwidths) -> Answer:
    """The columns of the view memory_bandwidth."""
    return Answer(
        {
            "device": found.device if found.by_device else [None] * len(found.time),
            "kind": texts(found.kinds, found.kind),
            "time_ns": found.time,
            "time_us": (found.time - found.origin_ns) / 1000,
            "bandwidth": found.bandwidth,
        }
    )


@view(
    "memory_bandwidth_summary",
    _SERIES + statistics_columns("GB/s", "bandwidths above 0, one per change"),
    nothing=_NO_COPIES,
)
def memory_bandwidth_summary(context: Context) -> Answer:
    """Statistics of the values of memory_bandwidth above 0. Each change counts once, however long it lasts."""
    return summary_columns(context.get(bandwidths))


def summary_columns(found: Bandwidths) -> Answer:
    """The columns of the view memory_bandwidth_summary."""
    rows = []
    for part in found.parts():
        values = found.bandwidth[part]
        values = values[values > 0]
        if len(values):
            device = int(found.device[part.start]) if found.by_device else None
            rows.append({"device": device, "kind": found.kinds[int(found.kind[part.start])], **describe(values)})
    names = [column.name for column in memory_bandwidth_summary.columns]
    return Answer({name: [row[name] for row in rows] for name in names})
