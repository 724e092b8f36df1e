"""Counters in Chrome traces: the events that draw them, and the rows of those in a file.

They are recorded hardware counters, and counters that were computed from a trace.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kineto_trace.arrays.codec import REAL, TEXT, TIME, Field, PreparedTexts, RowWriter
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import AnyArray, Flags, Floats, Ints, UInts8
from kineto_trace.formats.counter_series import GAP_CATEGORY, parse_series, series_points, shortest_decimals
from kineto_trace.formats.text_sinks import TextSink, escaped
from kineto_trace.model.trace import NO_STRING, TEXT_ID, Table, Trace

SHOWN = "shown"  # origin column: the number of the name that the row has in the file
MAX_DEVICE = 2**32 - 1
_COUNTER_PHASE = ord("C")
Columns = dict[str, AnyArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterTrack:
    """A value of one GPU over time. time: Unix ns, ascending; each value holds until the next one.

    member: the name of the value in the rows' arguments.
    category: of each row, a number into `categories`; None if the rows have none.
    """

    device: int
    name: str
    time: Ints
    value: Floats
    member: str = "%"
    thread: int = 0
    category: UInts8 | None = None
    categories: Sequence[str] = ()


def hardware_tracks(trace: Trace) -> Iterator[CounterTrack]:
    """Yields the tracks of the table `counter`. Their thread is the device number, which stays when ranks merge."""
    for series, points in series_points(trace):
        yield CounterTrack(
            device=series.device,
            name=series.shown,
            time=points.time,
            value=shortest_decimals(points.value),
            member="",  # Perfetto shows it after the name, which has the unit
            thread=series.device,
            category=points.what,
            categories=series.categories(),
        )


def write_counters(tracks: Iterable[CounterTrack], trace: Trace, base: int, sink: TextSink) -> None:
    """Writes the rows, with a comma after each. base: Unix ns that the file's times are relative to."""
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
    """Returns the pid of a GPU in the file: that of its kernels, by default the GPU's number."""
    kernels = trace.table("kernel")
    own = kernels.origin["pid"][kernels["device"] == device] if kernels.origin else np.empty(0, np.int64)
    return int(own[0]) if len(own) else device


def _process(trace: Trace, device: int) -> bytes:
    pid = gpu_pid(trace, device)
    return b"%d" % pid if pid > TEXT_ID else b'"%s"' % escaped(trace.strings[TEXT_ID - pid])


def fill_counters(columns: Columns, tid: Ints, category: AnyArray, strings: list[str]) -> Columns:
    """Fills the columns of the table except for the lengths of the samples. Returns further origin columns.

    columns: as in the file, with names.
    tid, category: of each row.
    """
    count = len(tid)
    origin: Columns = {SHOWN: columns["name"]}
    columns["device"] = np.where((tid >= 0) & (tid <= MAX_DEVICE), tid, 0).astype(np.uint32)
    kinds = group([columns["name"], category])
    known = [parse_series(strings[category[row]], strings[columns["name"][row]]) for row in kinds.first.tolist()]
    numbers = {text: number for number, text in enumerate(strings)}
    for name, texts in (
        ("name", [each.label for each in known]),
        ("metric", [each.metric or None for each in known]),
        ("unit", [each.unit or None for each in known]),
    ):
        columns[name] = np.array([_number(text, strings, numbers) for text in texts], np.int32)[kinds.number]
    told_values = columns.get("value", np.full(count, np.nan))
    has_value = np.array([each.has_value for each in known], np.bool_)[kinds.number]
    with np.errstate(over="ignore"):
        value = np.where(has_value, told_values.astype(np.float32), np.nan).astype(np.float64)
    columns["value"] = np.where(np.isfinite(value), value, np.nan)
    if not np.array_equal(columns["value"], told_values):
        origin["value"] = told_values
    return origin


def _number(text: str | None, strings: list[str], numbers: dict[str, int]) -> int:
    if text is None:
        return NO_STRING
    if text not in numbers:
        numbers[text] = len(strings)
        strings.append(text)
    return numbers[text]


def gap_rows(other: Table, strings: Sequence[str]) -> Flags:
    """Returns which rows of the table `other` are ends of samples."""
    if not other.origin or GAP_CATEGORY not in strings:
        return np.zeros(len(other), np.bool_)
    found: Flags = (other["phase"] == _COUNTER_PHASE) & (other["category"] == strings.index(GAP_CATEGORY))
    return found


def with_lengths(table: Table, other: Table, strings: Sequence[str]) -> Table:
    """Returns the table with the lengths of its samples: until the next row of the track.

    If the file has no end for the last row of a track, the row is as long as the previous one.
    """
    gaps = other.take(np.flatnonzero(gap_rows(other, strings)))
    both = [
        np.concatenate(pair)
        for pair in (
            (table.origin["pid"], gaps.origin.get("pid", np.empty(0, np.int64))),
            (table.origin["tid"], gaps.origin.get("tid", np.empty(0, np.int64))),
            (table.origin[SHOWN], gaps["name"]),
        )
    ]
    start = np.concatenate([table["start"], gaps["start"]])
    track = group(both).number
    order = np.lexsort((start, track))
    length = np.append(np.diff(start[order]), 0)
    first = np.append(True, np.diff(track[order]) != 0)
    last = np.append(first[1:], True)
    before = np.where(first, 0, np.append(0, length[:-1]))
    found = np.empty(len(order), np.int64)
    found[order] = np.where(last, before, length)
    return table.with_columns({"duration": found[: len(table)]})
