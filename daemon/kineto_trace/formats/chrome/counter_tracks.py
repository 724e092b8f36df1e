"""Counters that were computed from a trace, as rows of a Chrome trace: a viewer draws them beside the GPU's streams."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import REAL, TIME, Field, RowWriter
from kineto_trace.formats.shared.text_sinks import TextSink, escaped
from kineto_trace.model.trace import TEXT_ID, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterTrack:
    """A value of one GPU over time. time: Unix ns, ascending; each value, in %, holds until the next one."""

    device: int
    name: str
    time: npt.NDArray[np.int64]
    percent: npt.NDArray[np.float64]


def write_counters(tracks: Sequence[CounterTrack], trace: Trace, base: int, sink: TextSink) -> None:
    """Writes the rows, with a comma after each. base: what times of the file count from, Unix ns."""
    for track in tracks:
        head = b'{"ph":"C","pid":%s,"tid":0,"name":"%s","ts":' % (_process(trace, track.device), escaped(track.name))
        fields = [
            Field(head, TIME, track.time, base=base),
            Field(b',"args":{"%":', REAL, track.percent),
            Field(b"}},\n"),
        ]
        sink.rows(RowWriter(fields), len(track.time))


def _process(trace: Trace, device: int) -> bytes:
    """The process that the file has for a GPU: where its kernels are, and by default the GPU's number."""
    kernels = trace.table("kernel")
    if "pid" not in kernels.origin:
        return b"%d" % device
    pid = int(kernels.origin["pid"][kernels["device"] == device][0])
    return b"%d" % pid if pid > TEXT_ID else b'"%s"' % escaped(trace.strings[TEXT_ID - pid])
