"""Values over time as rows of a Chrome trace: a viewer draws them beside the GPU's streams.

They are hardware counters that were recorded, and counters that were computed from a trace.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import REAL, TEXT, TIME, Field, PreparedTexts, RowWriter
from kineto_trace.formats.shared.counter_series import series_points, shortest_decimals
from kineto_trace.formats.shared.text_sinks import TextSink, escaped
from kineto_trace.model.trace import TEXT_ID, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterTrack:
    """A value of one GPU over time. time: Unix ns, ascending; each value holds until the next one.

    member: what the value is called in the rows' arguments. category: of each row, a number into `categories`; None:
    the rows have none.
    """

    device: int
    name: str
    time: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    member: str = "%"
    thread: int = 0
    category: npt.NDArray[np.uint8] | None = None
    categories: Sequence[str] = ()


def hardware_tracks(trace: Trace) -> Iterator[CounterTrack]:
    """Yields the tracks of the table `counter`. Their thread is the number of the device: it stays when ranks merge."""
    for series, points in series_points(trace):
        yield CounterTrack(
            device=series.device,
            name=series.shown,
            time=points.time,
            value=shortest_decimals(points.value),
            member="",  # Perfetto shows it behind the name, which has the unit
            thread=series.device,
            category=points.what,
            categories=series.categories(),
        )


def write_counters(tracks: Iterable[CounterTrack], trace: Trace, base: int, sink: TextSink) -> None:
    """Writes the rows, with a comma after each. base: what times of the file count from, Unix ns."""
    for track in tracks:
        head = b'{"ph":"C","pid":%s,"tid":%d,"name":"%s"' % (
            _process(trace, track.device), track.thread, escaped(track.name),
        )  # fmt: skip
        fields = []
        if track.category is not None:
            texts = PreparedTexts([b',"cat":"%s"' % escaped(text) for text in track.categories])
            fields.append(Field(head, TEXT, track.category, texts))
            head = b""
        fields += [
            Field(head + b',"ts":', TIME, track.time, base=base),
            Field(b',"args":{"%s":' % escaped(track.member), REAL, track.value),
            Field(b"}},\n"),
        ]
        sink.rows(RowWriter(fields), len(track.time))


def gpu_pid(trace: Trace, device: int) -> int:
    """Returns the pid that a file has for a GPU: where its kernels are, and by default the GPU's number."""
    kernels = trace.table("kernel")
    own = kernels.origin["pid"][kernels["device"] == device] if kernels.origin else np.empty(0, np.int64)
    return int(own[0]) if len(own) else device


def _process(trace: Trace, device: int) -> bytes:
    pid = gpu_pid(trace, device)
    return b"%d" % pid if pid > TEXT_ID else b'"%s"' % escaped(trace.strings[TEXT_ID - pid])
