"""Writes Perfetto's native trace format (.pftrace, TrackEvent protobuf) from columns.

Theory of operation
    The rows of all tables become events on tracks (capture_packets.py for captures, chrome_packets.py for traces that
    were read from a file). Events are sorted by track and time; events of a track that do not nest go to additional
    tracks, so that the viewer drops none. Every track is a packet sequence of its own, which begins with its texts and
    a clock that starts at its first event; the native writer writes the rest, block by block. The order of everything
    follows from the trace alone: the same trace gives the same bytes.

    Apart from the sorted order (about 70 bytes per event) memory does not grow with the trace.

Events of a Chrome trace that Perfetto's format cannot express are kept in the file so that reading it loses none.
    These are metadata rows, flows (an arrow of Perfetto has neither the name, category and time of a flow nor ends
    without a slice) and events of other phases. They are the JSON of a Chrome trace, compressed, in blocks that each
    have a packet of their own, in a field that other programs skip. Arrows and names of tracks are in the file as well:
    they are for viewers, and the reader takes these rows instead of them.
"""

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.codec import Events
from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.base.array_types import Flags, Ints, UInts8, UInts16, UInts32, UInts64
from kineto_trace.base.quantities import times
from kineto_trace.formats import perfetto_proto as proto
from kineto_trace.formats.chrome.chrome_writer import base_ns, head_texts
from kineto_trace.formats.chrome.verbatim_writer import is_verbatim, write_rows
from kineto_trace.formats.perfetto.capture_packets import CaptureParts
from kineto_trace.formats.perfetto.chrome_packets import FileParts
from kineto_trace.formats.perfetto.packet_sections import Numbers, PacketPart, Tracks, used_numbers
from kineto_trace.formats.perfetto_proto import READY, SEQUENCE_LIMIT, SLICE, PacketKind, PacketWriter, nest_lanes
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.activity_tables import ViewerRow, tables_on
from kineto_trace.model.target_info import base_ns as file_base_ns
from kineto_trace.model.trace import API_TABLES, StringTable, Table, Trace, own_tables
from kineto_trace.structure.activity_links import forward_backward

METADATA = "kinetod"  # the name of our text about the whole trace
FIRST_SEQUENCE = 2  # sequence 1 has the packets about the whole trace
FLOW_BITS = 32  # the remaining bits of an arrow's id identify the trace
BLOCK_ROWS = 1 << 16
PIECE_BYTES = 1 << 20
_LEVEL = 1
_SEPARATOR = b",\n"


# Arrows between slices: from calls to the GPU work they caused, from forward to backward operators.
#
# Every arrow has an id of its own, which both of its ends carry. The viewer closes a flow at its first end, so a
# graph launch needs as many ids as it has kernels.
class Arrows(NamedTuple):
    """Arrows as pairs of event numbers: arrow n goes from source[n] to target[n].

    loose: number of further arrows, which have no slice at one of their ends.
    """

    source: Ints
    target: Ints
    loose: int = 0


class AppendResult(NamedTuple):
    """The result of append_perfetto. sequence: the first free one; notes: differences from the trace."""

    sequence: int
    notes: tuple[str, ...]


class _Layout(NamedTuple):
    """Events in the order in which they are written.

    number: as the parts number them.
    first: place of the first event of each track, in the order of `tracks`, followed by the number of all events.
    """

    number: Ints
    part: UInts8
    row: Numbers
    start: Ints
    end: Ints
    tracks: Ints
    first: Ints
    deepest: int
    shortened: int
    earlier_ns: int
    by_track: Events  # before events that do not nest moved to additional tracks
    slices: Flags  # those of by_track that are slices
    before_lanes: Ints  # the number of each event in by_track


@dataclass(slots=True)
class _File:
    """The events of all tracks, with the data needed to write them."""

    trace: Trace
    parts: list[PacketPart]
    tracks: Tracks
    annotations: proto.Annotations
    layout: _Layout
    first_sequence: int

    def write(self, arrows: Arrows, sink: TextSink) -> None:
        """Writes each track: its texts, then its events."""
        layout = self.layout
        categories = StringTable()
        kinds = [self._kind(part, categories) for part in self.parts]
        events = (layout.part, layout.row, layout.start, layout.end)
        writer = PacketWriter(kinds, events, self._flows(arrows), layout.deepest)
        if len(layout.tracks) > SEQUENCE_LIMIT - self.first_sequence:
            raise ValueError(f"{len(layout.tracks)} tracks do not fit into one file")
        bounds = zip(layout.tracks.tolist(), layout.first[:-1].tolist(), layout.first[1:].tolist(), strict=True)
        for place, (track, first, last) in enumerate(bounds):
            sequence = self.first_sequence + place
            texts = self._texts(kinds, categories, first, last)
            uuid, begin = self.tracks.infos[track].uuid, int(layout.start[first])
            sink.text(proto.sequence_packet(sequence, uuid, begin, texts))
            rows = writer.track(sequence, first, last)
            sink.rows(rows, rows.count)

    def _kind(self, part: PacketPart, categories: StringTable) -> PacketKind:
        category: int | Numbers
        if isinstance(part.category, str):
            category = categories.add(part.category) + 1 if part.category else 0
        else:
            texts = part.categories or self.trace.strings
            numbers = used_numbers(part.category, len(texts))
            ids = np.zeros(len(texts) + 1, np.uint32)
            ids[numbers] = [categories.add(texts[number]) + 1 for number in numbers.tolist()]
            category = ids[part.category]
        return PacketKind(part.type, category, part.name, part.fields, part.value)

    def _flows(self, arrows: Arrows) -> tuple[UInts64, UInts64]:
        """Returns the ends of all arrows, sorted by place: places of the events, and ids of the arrows."""
        place = np.empty(len(self.layout.number), np.int64)
        place[self.layout.number] = np.arange(len(place))
        base = self.tracks.uuid("flows") >> FLOW_BITS << FLOW_BITS
        ids = np.arange(1, len(arrows.source) + 1, dtype=np.uint64) + np.uint64(base)
        at = np.concatenate([place[arrows.source], place[arrows.target]])
        order = np.argsort(at, kind="stable")
        return at[order].astype(np.uint64), np.concatenate([ids, ids])[order]

    def _texts(self, kinds: list[PacketKind], categories: StringTable, first: int, last: int) -> bytes:
        """Returns the interned texts that the events of a track refer to."""
        part, row = self.layout.part[first:last], self.layout.row[first:last]
        strings = self.trace.strings
        used_categories: set[int] = set()
        names: set[int] = set()
        annotation_names: set[int] = set()
        values: set[int] = set()
        for number in np.flatnonzero(np.bincount(part)).tolist():
            rows = row[part == number]
            kind = kinds[number]
            if isinstance(kind.category, int):
                used_categories.add(kind.category)
            else:
                used_categories.update(unique_values(kind.category[rows]).tolist())
            if kind.name is not None:
                names.update(used_numbers(kind.name[rows], len(strings)).tolist())
            readies = iter(self.parts[number].readies)
            for field in kind.fields:
                if field.operation != READY:
                    annotation_names.add(field.name)
                    continue
                entries = next(readies)
                for used in unique_values(field.column[rows]).tolist():
                    if 0 <= used < len(entries):
                        annotation_names |= entries[used].names
                        values |= entries[used].texts
        return proto.interned(
            [(number, categories.strings[number - 1]) for number in sorted(used_categories - {0})],
            [(number + 1, strings[number]) for number in sorted(names)],
            self.annotations.name_texts(annotation_names),
            self.annotations.value_texts(values),
        )


def capture_arrows(trace: Trace, offsets: Mapping[str, int]) -> Arrows:
    """Returns the arrows of a capture. offsets: the number of the first event of each table that is shown."""
    arrows = _launches(trace, offsets)
    if "cpu_op" not in offsets:
        return arrows
    links, first = forward_backward(trace.tables), offsets["cpu_op"]
    source = np.concatenate([arrows.source, links.forward_rows + first])
    return Arrows(source, np.concatenate([arrows.target, links.backward_rows + first]))


def file_arrows(trace: Trace, shown: Events, slices: Flags, track: UInts32) -> Arrows:
    """Returns the arrows of a file: its events of phases s, t and f, each at the slice of its time.

    shown: all events, sorted by track and start; arrows refer to places in it.
    slices: which of them are slices.
    track: the track of each row of the table `flow`.

    An arrow goes from each s or t to every following t or f of the same id and category, up to the next s or t.
    """
    flow = trace.table("flow")
    if not len(flow):
        return Arrows(np.empty(0, np.int64), np.empty(0, np.int64))
    places = _slices_at(shown, slices, track, flow["start"])
    begins = flow["phase"] != ord("f")
    order = np.lexsort((~begins, flow["start"], flow["id"], flow["category"]))
    same = (np.diff(flow["id"][order], prepend=0) == 0) & (np.diff(flow["category"][order], prepend=0) == 0)
    group = np.cumsum(~same)
    begin = begins[order]
    position = np.arange(len(order))
    last = np.maximum.accumulate(np.where(begin, position, -1))
    before = np.concatenate([[-1], last[:-1]])  # the last beginning before each event
    follows = (flow["phase"][order] != ord("s")) & (before >= 0) & (group[before] == group)
    source, target = places[order[before[follows]]], places[order[follows]]
    known = (source >= 0) & (target >= 0)
    return Arrows(source[known], target[known], int(np.count_nonzero(~known)))


def _slices_at(shown: Events, slices: Flags, track: UInts32, time: Ints) -> Ints:
    """Returns the place of each moment's slice on the track; -1 if there is none.

    This is the innermost slice that runs then, if it begins then; or one without duration at that moment; or the
    innermost slice that runs then; or one that ends then.
    """
    if not len(shown) or shown.end is None:
        return np.full(len(time), -1, np.int64)
    running = _running_at(shown, track, time)
    begins = (running >= 0) & (shown.start[running] == time)
    short = slices & (shown.end == shown.start)
    found = np.where(begins, running, _ending_at(shown, np.flatnonzero(short), track, time))
    found = np.where(found >= 0, found, running)
    missing = np.flatnonzero(found < 0)
    if len(missing):
        found[missing] = _ending_at(shown, np.flatnonzero(slices & ~short), track[missing], time[missing])
    return found


def _ending_at(shown: Events, rows: Ints, track: UInts32, time: Ints) -> Ints:
    """Returns the last of these rows that ends on the track at each time; -1 if there is none."""
    if shown.end is None or not len(rows):
        return np.full(len(time), -1, np.int64)
    known, rank = np.unique(shown.end[rows], return_inverse=True)
    keys = shown.track[rows].astype(np.uint64) << np.uint64(32) | rank.reshape(-1).astype(np.uint64)
    at = np.minimum(np.searchsorted(known, time), len(known) - 1)
    wanted = track.astype(np.uint64) << np.uint64(32) | at.astype(np.uint64)
    found: Ints = np.where(known[at] == time, lookup(wanted, keys, rows, -1), -1)
    return found


def _running_at(shown: Events, track: UInts32, time: Ints) -> Ints:
    """Returns the place of the innermost slice that runs on the track at each time; -1 if there is none."""
    tree = shown.nest(int(shown.end.max()) + 1 if shown.end is not None else 0)
    nested = Events(shown.track, shown.start, tree.end)
    return nested.enclosing(tree.parent, Events(track, time)).astype(np.int64)


def _launches(trace: Trace, offsets: Mapping[str, int]) -> Arrows:
    """Returns the arrows from each call to the work with its correlation id."""
    own_calls, own_work = (own_tables(trace.tables, row) for row in (ViewerRow.CALL, ViewerRow.GPU))
    # Of equal correlations the last one counts: the runtime's call wins over the driver's.
    calls = [kind for kind in (*own_calls, *reversed(API_TABLES)) if kind in offsets]
    work = [kind for kind in (*tables_on(ViewerRow.GPU, ViewerRow.SYNC), *own_work) if kind in offsets]
    if not calls or not work:
        return Arrows(np.empty(0, np.int64), np.empty(0, np.int64))

    def joined(kinds: list[str]) -> tuple[UInts32, Ints]:
        tables = [trace.table(kind) for kind in kinds]
        numbers = [offsets[table.kind] + np.arange(len(table)) for table in tables]
        return np.concatenate([table["correlation"] for table in tables]), np.concatenate(numbers)

    (wanted, target), (known, source) = joined(work), joined(calls)
    found = lookup(wanted, known, source, -1)
    linked = (found >= 0) & (wanted != 0)
    return Arrows(found[linked], target[linked])


def write_perfetto(trace: Trace, sink: TextSink) -> tuple[str, ...]:
    """Writes the whole file into the sink. Returns notes on differences from the trace."""
    return append_perfetto(trace, sink).notes


def append_perfetto(trace: Trace, sink: TextSink, sequence: int = FIRST_SEQUENCE) -> AppendResult:
    """Appends a trace to others in the same file, whose packet sequences are all below `sequence`.

    No other trace in the file may have the same processes, or the same host, pid and rank.
    """
    tracks = Tracks(f"{trace.target.host}\0{trace.target.pid}\0{trace.target.rank}")
    annotations = proto.Annotations()
    make: type[FileParts] | type[CaptureParts] = FileParts if is_verbatim(trace) else CaptureParts
    content = make(trace, tracks, annotations)
    parts = content.all()
    layout = _lay_out(parts, tracks)
    arrows = _arrows(trace, content, parts, layout)
    sink.text(proto.clock_packet(max(0, trace.window_start_ns)))
    sink.text(proto.metadata_packet(METADATA, _metadata(trace, tracks, content.ids)))
    if isinstance(content, FileParts):
        for block in packed(trace, content.kept, file_base_ns(trace.head or {}, [])):
            sink.text(proto.rows_packet(block))
    for info in tracks.infos:
        sink.text(proto.track_packet(info))
    _File(trace, parts, tracks, annotations, layout, sequence).write(arrows, sink)
    notes = [*content.notes, *_arrow_notes(trace, arrows)]
    if layout.shortened:
        overlapping = times(layout.shortened, "event overlaps", "events overlap")
        notes.append(f"{overlapping} too many others on the same track, so ends were moved")
    if layout.earlier_ns:
        notes.append(f"negative times cannot be stored: all times are shifted by {layout.earlier_ns} ns")
    return AppendResult(sequence + len(layout.tracks), tuple(notes))


def _arrows(trace: Trace, content: FileParts | CaptureParts, parts: list[PacketPart], layout: "_Layout") -> Arrows:
    """Returns the arrows, with the numbers of events."""
    if isinstance(content, CaptureParts) or not len(trace.table("flow")):
        return capture_arrows(trace, _offsets(parts))
    found = file_arrows(trace, layout.by_track, layout.slices, content.tracks_of(trace.table("flow")))
    return Arrows(layout.before_lanes[found.source], layout.before_lanes[found.target], found.loose)


def _arrow_notes(trace: Trace, arrows: Arrows) -> list[str]:
    """Returns notes on arrows of the file that a viewer does not show, and on missing ones."""
    if arrows.loose:
        every = len(arrows.source) + arrows.loose
        return [f"{arrows.loose} of {every} arrows have no slice at one end, so viewers do not show them"]
    if trace.head is not None and not len(trace.table("flow")) and len(arrows.source):
        return [f"the file has no arrows; {len(arrows.source)} were added from correlation and sequence numbers"]
    return []


def _metadata(trace: Trace, tracks: Tracks, ids: Mapping[int, Sequence[str]]) -> str:
    """Returns what a reader needs: the head of the Chrome trace, and pid and tid of each track (by hexadecimal uuid).

    Tracks without pid and tid repeat data of other events.
    """
    base = base_ns(trace.window_start_ns)
    ids_of = {info.uuid: ids.get(tracks.bases.get(number, number), []) for number, info in enumerate(tracks.infos)}
    values = {
        "head": dict(trace.head) if trace.head is not None else head_texts(trace, base),
        "from_file": trace.head is not None,
        "kept_rows": is_verbatim(trace),
        "base_ns": file_base_ns(trace.head, []) if trace.head is not None else base,
        "tracks": {f"{uuid:x}": found for uuid, found in ids_of.items()},
        "target": json.loads(trace.target.to_json()),
        "losses": asdict(trace.losses),
        "window_start_ns": trace.window_start_ns,
        "window_end_ns": trace.window_end_ns,
        "sample_period_ns": trace.sample_period_ns,
        "notes": list(trace.notes),
    }
    return json.dumps(values, ensure_ascii=False, sort_keys=True)


def _offsets(parts: list[PacketPart]) -> dict[str, int]:
    """Returns the number of the first event of each table."""
    offsets: dict[str, int] = {}
    first = 0
    for part in parts:
        if part.kind:
            offsets.setdefault(part.kind, first)
        first += len(part)
    return offsets


def _lay_out(parts: list[PacketPart], tracks: Tracks) -> _Layout:
    sizes = [len(part) for part in parts]
    if len(parts) > 255:
        raise ValueError(f"a trace has {len(parts)} parts, but at most 255 fit")
    empty = np.empty(0, np.int64)
    which = np.repeat(np.arange(len(parts), dtype=np.uint8), sizes)
    row = np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes] or [empty.astype(np.uint32)])
    start = np.concatenate([part.start for part in parts] or [empty])
    end = np.maximum(np.concatenate([part.end for part in parts] or [empty]), start)
    track = np.concatenate([part.track for part in parts] or [empty.astype(np.uint32)])
    leaf = np.array([part.leaf for part in parts], np.uint8)[which] if parts else which
    types = np.array([part.type for part in parts], np.uint8)
    order = by_number = Events(track, start, end, which).order()
    track, start = track[order], start[order]
    by_track, before_lanes = Events(track, start, end[order]), order.astype(np.int64)
    lanes = nest_lanes(track, start, end[order], leaf[order])
    end = lanes.end
    if lanes.lane.any():
        track = _with_lanes(track, lanes.lane, tracks)
        moved = np.argsort(track, kind="stable")
        order, track, start, end = order[moved], track[moved], start[moved], end[moved]
    begins = np.flatnonzero(np.diff(track.astype(np.int64), prepend=-1))
    earliest = min(0, int(start.min(initial=0)))  # the format has no times before 0
    return _Layout(
        number=order.astype(np.int64),
        part=which[order],
        row=row[order],
        start=start - earliest if earliest else start,
        end=end - earliest if earliest else end,
        tracks=track[begins].astype(np.int64),
        first=np.append(begins, len(track)),
        deepest=lanes.deepest,
        shortened=lanes.shortened,
        earlier_ns=-earliest,
        by_track=by_track,
        slices=types[which[by_number]] == SLICE if parts else which.astype(np.bool_),
        before_lanes=before_lanes,
    )


def _with_lanes(track: Numbers, lane: UInts16, tracks: Tracks) -> Numbers:
    """Returns the tracks of all events; events beyond the first lane of a track are on a track of their own lane."""
    track = track.copy()
    further = np.flatnonzero(lane)
    keys, place = np.unique(track[further].astype(np.int64) << 16 | lane[further], return_inverse=True)
    numbers = [tracks.overlap(key >> 16, key & 0xFFFF) for key in keys.tolist()]
    track[further] = np.array(numbers, np.uint32)[place.reshape(-1)]
    return track


def packed(trace: Trace, tables: Sequence[Table], base_ns: int) -> Iterator[bytes]:
    """Yields the rows of tables that have origin columns, in compressed blocks. base_ns: Unix ns of their time 0."""
    for table in tables:
        for first in range(0, len(table), BLOCK_ROWS):
            block = table.take(np.arange(first, min(first + BLOCK_ROWS, len(table))))
            file = io.BytesIO()
            with TextSink(file) as sink:
                write_rows(trace, [block], base_ns, sink)
            yield zlib.compress(file.getvalue().removesuffix(_SEPARATOR), _LEVEL)


def unpacked(block: bytes) -> Iterator[bytes]:
    """Yields the JSON of a block, piece by piece. Raises ValueError if the block is damaged."""
    decompressor = zlib.decompressobj()
    while block and not decompressor.eof:
        try:
            yield decompressor.decompress(block, PIECE_BYTES)
        except zlib.error as exc:
            raise ValueError(str(exc)) from exc
        block = decompressor.unconsumed_tail
