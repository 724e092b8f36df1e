"""The contents of a Perfetto trace: the rows of each table with their times, tracks and annotations.

Annotations have the names of Kineto's JSON arguments; arguments that a row lacks (no graph, no op) are left out.

Rows of the Perfetto viewer: processes, threads, GPU streams, counters.

A process contains its threads, and a group for each of its GPUs with a track per stream. Events of a track that do not
nest go to additional tracks, which are created when all events are known (`overlap`).
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kineto_trace.arrays.codec import PreparedTexts
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Ints, Ints32, UInts32
from kineto_trace.formats.counter_series import HardwareSeries, series_points
from kineto_trace.formats.perfetto_proto import (
    COUNTER,
    DOUBLE,
    DOUBLE_COUNTER,
    OPTIONAL,
    READY,
    SIGNED,
    UNIT_UNSPECIFIED,
    UNSIGNED,
    Annotations,
    Counter,
    PacketField,
    Ready,
    TrackInfo,
)
from kineto_trace.formats.viewer_rows import row_name
from kineto_trace.model.trace import Trace

Numbers = UInts32
NOT_READY = 0xFFFFFFFF
Place = tuple[int, str, str]  # parent track of a counter, and the counter's pid and tid in a Chrome trace, as JSON
INT32_LIMIT = 1 << 31
GPU_RANK = 1000  # GPUs come after the other tracks of a process
OVERHEAD_RANK = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketPart:
    """Rows of the same form. Times are in Unix ns; every array has one value per row.

    type: as in perfetto_native.
    category: one text for all rows, or the number of a text for each row, in `categories` or, without these, in
        Trace.strings.
    leaf: nothing may be nested inside the rows.
    value: the values of counters.
    readies: the entries of each READY field, in the order of those fields.
    """

    type: int
    category: str | Ints32
    categories: Sequence[str] = ()
    start: Ints
    end: Ints
    track: Numbers
    name: Ints32 | None
    fields: Sequence[PacketField] = ()
    readies: Sequence[Sequence[Ready]] = ()
    leaf: bool = False
    value: AnyArray | None = None
    kind: str = ""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class FieldList:
    """Collects the annotations of one part."""

    annotations: Annotations
    fields: list[PacketField] = field(default_factory=list)
    readies: list[Sequence[Ready]] = field(default_factory=list)

    def unsigned(self, name: str, column: AnyArray) -> None:
        """Adds an unsigned number that every row has."""
        self.fields.append(PacketField(self.annotations.name(name), UNSIGNED, column))

    def signed(self, name: str, column: AnyArray) -> None:
        """Adds a signed number that every row has."""
        self.fields.append(PacketField(self.annotations.name(name), SIGNED, column))

    def number(self, name: str, column: AnyArray) -> None:
        """Adds an integer that every row has, signed or unsigned as its column."""
        (self.signed if column.dtype.kind == "i" else self.unsigned)(name, column)

    def double(self, name: str, column: AnyArray) -> None:
        """Adds a floating-point number that every row has."""
        self.fields.append(PacketField(self.annotations.name(name), DOUBLE, column.astype(np.float64, copy=False)))

    def optional(self, name: str, column: AnyArray, missing: int = 0) -> None:
        """Adds a number that rows with the value `missing` do not have."""
        if (column == missing).all():
            return
        if column.dtype.kind == "u":  # use a signed type that holds the values
            column = column.astype(f"i{min(8, 2 * column.itemsize)}")
        self.fields.append(PacketField(self.annotations.name(name), OPTIONAL, column, missing))

    def ready(self, column: AnyArray, entries: Sequence[Ready]) -> None:
        """Adds whole annotations by their numbers in `entries`; NOT_READY or any other invalid number adds nothing."""
        table = PreparedTexts([entry.content for entry in entries])
        self.fields.append(PacketField(0, READY, column, ready=table))
        self.readies.append(entries)

    def texts(self, name: str, column: Ints32, strings: Sequence[str]) -> None:
        """Adds an annotation whose values are strings, by their numbers; NO_STRING adds nothing."""
        self._numbered(column, strings, lambda text: self.annotations.ready({name: text}))

    def members(self, column: Ints32, strings: Sequence[str]) -> None:
        """Adds annotations that are strings of JSON members, by their numbers; NO_STRING adds nothing."""
        self._numbered(column, strings, self.annotations.ready_text)

    def _numbered(self, column: Ints32, strings: Sequence[str], entry: Callable[[str], Ready]) -> None:
        used = used_numbers(column, len(strings))
        if not len(used):
            return
        numbers = np.full(len(strings) + 1, NOT_READY, np.uint32)
        numbers[used] = np.arange(len(used))
        self.ready(numbers[column], [entry(strings[number]) for number in used.tolist()])


class Tracks:
    """Numbered tracks, in the order in which they were first requested."""

    def __init__(self, owner: str) -> None:
        """owner: a text that differs between any traces that may be combined in one file."""
        self._owner = owner
        self._numbers: dict[Hashable, int] = {}
        self.infos: list[TrackInfo] = []
        self.bases: dict[int, int] = {}  # additional track -> the track whose overlapping events it takes

    def _add(self, key: tuple[Hashable, ...], name: str, parent: int | None = None, **more: object) -> int:
        found = self._numbers.get(key)
        if found is not None:
            return found
        above = 0 if parent is None else self.infos[parent].uuid
        info = TrackInfo(self.uuid(key), name, above)._replace(**more)  # type: ignore[arg-type]
        self._numbers[key] = len(self.infos)
        self.infos.append(info)
        return self._numbers[key]

    def uuid(self, key: Hashable) -> int:
        """Returns a uuid that is stable for the same trace and unique to the track. It is never 0, which means none."""
        digest = hashlib.blake2b(f"{self._owner}\0{key!r}".encode("utf-8", "replace"), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 | 1

    def process(self, pid: int, name: str, label: str = "", rank: int = 0) -> int:
        """Returns a process, or a group of tracks if `pid` is not a valid process id. rank: order among processes."""
        if 0 < pid < INT32_LIMIT:
            return self._add(("process", pid), name, pid=pid, label=label, rank=rank)
        return self.group(f"process {pid}", name, rank=rank)

    def group(self, key: str, name: str, parent: int | None = None, rank: int = 0) -> int:
        """Returns a track that has only a name; other tracks may be below it."""
        above = 0 if parent is None else self.infos[parent].uuid
        return self._add(("group", above, key), name, parent, rank=rank)

    def thread(self, process: int, tid: int, name: str, rank: int = 0) -> int:
        """Returns a thread of the process, or a group below it if the numbers are not valid for a thread."""
        pid = self.infos[process].pid
        if pid > 0 and 0 < tid < INT32_LIMIT:
            return self._add(("thread", pid, tid), name, pid=pid, tid=tid, rank=rank)
        return self.group(f"thread {tid}", name, process, rank)

    def gpu(self, process: int, device: int) -> int:
        """Returns the group of a GPU."""
        return self.group(f"GPU {device}", f"GPU {device}", process, GPU_RANK + max(device, -1))

    def stream(self, process: int, device: int, row: int) -> int:
        """Returns the track of a GPU stream: `row` as in formats/viewer_rows.py."""
        name = row_name(device, row).rstrip()
        return self.group(f"row {row}", name, self.gpu(process, device), row + 1)

    def counter(self, parent: int, name: str, counter: Counter) -> int:
        """Returns the track of a counter."""
        return self._add(("counter", self.infos[parent].uuid, name), name, parent, counter=counter)

    def overlap(self, track: int, lane: int) -> int:
        """Adds a track for events of `track` that do not nest there."""
        base = self.infos[track]
        name = f"{base.name} (overlap {lane})"
        key = ("overlap", base.uuid, lane)
        number = len(self.infos)
        if base.tid >= 0 or base.pid >= 0:
            number = self._add(key, name, track, rank=lane)
        else:
            self.infos.append(base._replace(uuid=self.uuid(key), name=name))
        self.bases[number] = track
        return number


def used_numbers(column: AnyArray, limit: int) -> Ints:
    """Returns the distinct numbers in a column, ascending; numbers outside 0 … limit - 1 are ignored."""
    if len(column) < limit // 8:
        found = unique_values(column).astype(np.int64)
        return found[(found >= 0) & (found < limit)]
    seen = np.zeros(limit + 1, np.bool_)
    seen[column] = True  # -1 sets the last one
    return np.flatnonzero(seen[:limit])


def counter_part(start: Ints, value: AnyArray, track: int) -> PacketPart:
    """Returns the values of one counter."""
    whole, tracks = value.dtype.kind == "i", np.full(len(start), track, np.uint32)
    kind = COUNTER if whole else DOUBLE_COUNTER
    return PacketPart(type=kind, category="", start=start, end=start, track=tracks, name=None, value=value)


def hardware_counters(
    trace: Trace, tracks: Tracks, ids: dict[int, list[str]], place: Callable[[HardwareSeries], Place]
) -> list[PacketPart]:
    """Returns one part with all points of all series, or none. Adds their rows in a Chrome trace to `ids`."""
    times, values, codes, numbers = [], [], [], []
    categories: dict[str, int] = {}
    for series, points in series_points(trace):
        above, pid, tid = place(series)
        track = tracks.counter(above, series.title, Counter(UNIT_UNSPECIFIED, series.unit))
        ids[track] = [pid, tid, json.dumps(series.shown), json.dumps("")]
        code = [categories.setdefault(text, len(categories)) for text in series.categories()]
        times.append(points.time)
        values.append(points.value)
        codes.append(np.array(code, np.int32)[points.what])
        numbers.append(np.full(len(points.time), track, np.uint32))
    if not times:
        return []
    start = np.concatenate(times)
    part = PacketPart(
        type=DOUBLE_COUNTER,
        category=np.concatenate(codes),
        categories=list(categories),
        start=start,
        end=start,
        track=np.concatenate(numbers),
        name=None,
        value=np.concatenate(values),
    )
    return [part]
