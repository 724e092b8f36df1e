"""Builds the parts of a Perfetto trace from the tables of a trace that was read from a Chrome trace.

Theory of operation
    Every process and thread of the file is a track with the name that the file's metadata rows (ph "M") give it. GPU
    rows make their process a group of tracks. The arguments are those of the file: columns with a bit in `present`, and
    the others from their JSON text. A tid is the same as a text and as a number: old files have "7" at operators and 7
    at flows. Of the rows that are not activities, complete events, pairs of begin and end, instants and counters are
    shown; metadata rows provide the names of tracks, also of those without events. A note states the number of the
    remaining rows (asynchronous events, objects, …). Rows that are not shown are kept (perfetto_writer.py), and so are
    counter events without exactly one number: a track's sample has no link to the other samples of its event.
"""

import json
from typing import Any

import numpy as np

from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.id_sets import distinct, lookup, unique_values
from kineto_trace.base.array_types import AnyArray, Ints, UInts64
from kineto_trace.base.quantities import times
from kineto_trace.formats.chrome.chrome_tables import whole_number
from kineto_trace.formats.chrome.counter_tracks import gap_rows, gpu_pid
from kineto_trace.formats.counter_series import HardwareSeries
from kineto_trace.formats.perfetto.packet_sections import (
    INT32_LIMIT,
    FieldList,
    Numbers,
    PacketPart,
    Place,
    Tracks,
    counter_part,
    hardware_counters,
    used_numbers,
)
from kineto_trace.formats.perfetto_proto import INSTANT, SLICE, Annotations, Counter
from kineto_trace.formats.viewer_rows import NESTING
from kineto_trace.model import activity_tables as bits
from kineto_trace.model.activity_tables import FIRST_ARG_BIT, KINDS, MEMORY, OTHER, Arg
from kineto_trace.model.trace import COUNTER_TABLES, DEVICE_TABLES, GPU_TABLES, TEXT_ID, Table, Trace
from kineto_trace.structure.event_arguments import parse

ORDER = (*NESTING, OTHER)
NO_TRACK = 0xFFFFFFFF
_UNSIGNED = (bits.U64, bits.U32, bits.U16)
_NAMED = 1 << 16  # distinct metadata rows that are read at most
_PAIR = tuple(map(ord, "BE"))
_INSTANTS = tuple(map(ord, "iIR"))


class FileParts:
    """Builds the parts.

    ids: for each track its pid and tid as JSON texts; for counters also name and member.
    kept: rows that no part shows.
    """

    def __init__(self, trace: Trace, tracks: Tracks, annotations: Annotations) -> None:
        self._trace, self._tracks, self._annotations = trace, tracks, annotations
        self._strings = trace.strings
        self.notes: list[str] = []
        self.ids: dict[int, list[str]] = {}
        self.kept: list[Table] = []
        tables = [table for table in trace.tables.values() if len(table) and table.origin]
        self._pids, self._tids, self._pairs = Interner(), Interner(), Interner()
        self._has_texts = any((table.origin["tid"] <= TEXT_ID).any() for table in tables)
        self._spelled: dict[int, tuple[int, int]] = {}  # pair -> its pid and tid as the file has them
        for table in tables:
            shown = table.kind in ORDER and (table["phase"] != ord("M") if table.kind == "other" else slice(None))
            self._pair(table.origin["pid"][shown], table.origin["tid"][shown])
        used = len(self._pairs)
        for table in tables:  # these rows make no track of their own
            self._pair(table.origin["pid"], table.origin["tid"])
        self._gpus = {
            value
            for table in tables
            if table.kind in (*DEVICE_TABLES, *COUNTER_TABLES)
            for value in unique_values(self._plain(table.origin["pid"])).tolist()
        }
        if not (beside := trace.table("counter")).origin:  # recorded beside the file
            pids = [gpu_pid(trace, device) for device in unique_values(beside["device"]).tolist()]
            self._gpus.update(self._plain(np.array(pids, np.int64)).tolist())
        self._order: dict[tuple[int, int], int] = {}  # pid and tid, 0 for the process -> rank among its siblings
        self._names = self._metadata(trace.table("other"))
        self._by_pair = self._make_tracks(used)

    def _pair(self, pid: Ints, tid: Ints) -> Numbers:
        """Returns the number of each row's (pid, tid) pair."""
        plain_pid, plain_tid = self._plain(pid), self._plain(tid)
        keys = self._pids.intern(plain_pid.view(np.uint64)).astype(np.uint64) << np.uint64(32)
        pairs = self._pairs.intern(keys | self._tids.intern(plain_tid.view(np.uint64)))
        if self._has_texts:
            numbers, first = np.unique(pairs, return_index=True)
            for number, row in zip(numbers.tolist(), first.tolist(), strict=True):
                own = int(pid[row]), int(tid[row])
                # A number in any row makes all rows use the number: the plug-in fails on allocations whose tid is a
                # text.
                self._spelled[number] = max(own, self._spelled.get(number, own))
        return pairs

    def _plain(self, ids: Ints) -> Ints:
        """Returns pids or tids with texts that are whole numbers as these numbers."""
        texts = ids <= TEXT_ID
        if not texts.any():
            return ids
        known = distinct(TEXT_ID - ids[texts]).astype(np.int64)
        plain = np.array(
            [
                found if isinstance(found, int) else TEXT_ID - number
                for number in known.tolist()
                for found in [whole_number(TEXT_ID - number, self._strings)]
            ]
        )
        found = ids.copy()
        found[texts] = lookup((TEXT_ID - ids[texts]).view(np.uint64), known.view(np.uint64), plain, 0)
        return found

    def _text(self, value: int) -> str:
        """Returns a pid or tid as text."""
        return self._strings[TEXT_ID - value] if value <= TEXT_ID else str(value)

    def _json(self, value: int) -> str:
        return json.dumps(self._text(value)) if value <= TEXT_ID else str(value)

    def _metadata(self, other: Table) -> dict[tuple[str, int, int], str]:
        """Returns (name of the row, pid, tid) -> the row's text; tid is 0 for processes."""
        found: dict[tuple[str, int, int], str] = {}
        if not other.origin:
            return found
        wanted = {"process_name": "name", "process_labels": "labels", "thread_name": "name"}
        wanted |= {"process_sort_index": "sort_index", "thread_sort_index": "sort_index"}
        numbers = [number for number, text in enumerate(self._strings) if text in wanted]
        rows = self._different(other, np.flatnonzero((other["phase"] == ord("M")) & np.isin(other["name"], numbers)))
        pids, tids = (self._plain(other.origin[name][rows]).tolist() for name in ("pid", "tid"))
        for row, pid, tid in zip(rows.tolist(), pids, tids, strict=True):
            what = self._strings[other["name"][row]]
            text = self._members(int(other.origin["args"][row])).get(wanted[what])
            key = pid, tid if what.startswith("thread") else 0
            if what.endswith("sort_index"):
                if isinstance(text, int) and abs(text) < INT32_LIMIT:
                    self._order[key] = int(text)
            elif isinstance(text, str):
                found[(what, *key)] = text
        return found

    def _different(self, other: Table, rows: Ints) -> Ints:
        """Returns the last one of each kind of equal metadata rows (some files repeat them thousands of times)."""
        rows = rows[::-1]
        content = other["name"][rows].astype(np.uint64) << np.uint64(32)
        content |= other.origin["args"][rows].astype(np.uint32)
        keys = Interner().intern(content).astype(np.uint64) << np.uint64(32)
        equal = Interner().intern(keys | self._pair(other.origin["pid"][rows], other.origin["tid"][rows]))
        return np.sort(rows[np.unique(equal, return_index=True)[1]][:_NAMED])

    def _members(self, number: int) -> dict[str, Any]:
        return parse(self._strings[number]) if number >= 0 else {}

    def _make_tracks(self, used: int) -> Numbers:
        """Returns the track of each of the first `used` pairs, and NO_TRACK for the others.

        Named processes and threads without events have tracks, too.
        """
        pids, tids = self._pids.keys().view(np.int64), self._tids.keys().view(np.int64)
        numbers = []
        for place, key in enumerate(self._pairs.keys()[:used].tolist()):
            pid, tid = int(pids[key >> 32]), int(tids[key & 0xFFFFFFFF])
            numbers.append(self._thread(pid, tid, self._spelled.get(place, (pid, tid))))
        for what, pid, tid in self._names:
            if what == "thread_name":
                self._thread(pid, tid, (pid, tid))
            else:
                self._process(pid)
        return np.array(numbers + [NO_TRACK] * (len(self._pairs) - used), np.uint32)

    def _thread(self, pid: int, tid: int, spelled: tuple[int, int]) -> int:
        process = self._process(pid)
        name = self._names.get(("thread_name", pid, tid)) or self._text(tid)
        rank = self._order.get((pid, tid), 0)
        if pid > 0 and pid not in self._gpus and tid > TEXT_ID:
            number = self._tracks.thread(process, tid, name, rank)
        else:
            number = self._tracks.group(f"thread {self._text(tid)}", name, process, rank)
        self.ids.setdefault(number, [self._json(value) for value in spelled])
        return number

    def _process(self, pid: int) -> int:
        name = self._names.get(("process_name", pid, 0), "")
        label = self._names.get(("process_labels", pid, 0), "")
        rank = self._order.get((pid, 0), 0)
        if pid <= TEXT_ID or pid in self._gpus or pid <= 0:
            words = [name, label if label != name else ""]
            shown = " ".join(filter(None, words)) or self._text(pid)
            return self._tracks.group(f"process {self._text(pid)}", shown, rank=rank)
        return self._tracks.process(pid, name or f"process {pid}", label, rank)

    def tracks_of(self, table: Table) -> Numbers:
        """Returns the track of each row."""
        found: Numbers = self._by_pair[self._pair(table.origin["pid"], table.origin["tid"])]
        return found

    # ---- parts

    def all(self) -> list[PacketPart]:
        """Returns all parts that have rows."""
        parts = []
        self.kept = [flow] if (flow := self._trace.table("flow")).origin else []
        for kind in ORDER:
            table = self._trace.table(kind)
            if not len(table) or not table.origin:
                continue
            if kind == "other":
                parts += self._others(table)
            else:
                parts.append(self._part(table, INSTANT if kind == MEMORY else SLICE, table.end(), kind))
        return [*parts, *hardware_counters(self._trace, self._tracks, self.ids, self._below_process)]

    def _below_process(self, series: HardwareSeries) -> Place:
        origin, row = self._trace.table("counter").origin, int(series.rows[0])
        pid, tid = gpu_pid(self._trace, series.device), series.device
        if origin:
            pid, tid = (int(origin[name][row]) for name in ("pid", "tid"))
        (plain,) = self._plain(np.array([pid])).tolist()
        return self._process(plain), self._json(pid), self._json(tid)

    def _part(self, table: Table, type_: int, end: Ints, kind: str = "") -> PacketPart:
        fields = self._arguments(table)
        return PacketPart(
            type=type_,
            category=table.origin["category"],
            kind=kind,
            start=table["start"],
            end=end if type_ == SLICE else table["start"],
            track=self.tracks_of(table),
            name=np.ascontiguousarray(table["name"]),
            fields=fields.fields,
            readies=fields.readies,
            leaf=table.kind in GPU_TABLES,
        )

    def _arguments(self, table: Table) -> FieldList:
        fields = FieldList(self._annotations)
        present = np.ascontiguousarray(table.origin["present"])
        seen = int(np.bitwise_or.reduce(present))
        for place, arg in enumerate(KINDS[table.kind]):
            if seen >> FIRST_ARG_BIT + place & 1:
                self._argument(fields, arg, table, present, FIRST_ARG_BIT + place)
        other = table.columns["inputs"] if "inputs" in table.columns else table.origin["args"]
        fields.members(other, self._strings)
        return fields

    def _argument(self, fields: FieldList, arg: Arg, table: Table, present: UInts64, bit: int) -> None:
        column = _column(table, arg.columns[0])
        if arg.type == bits.I32X3:
            self._triple(fields, arg, table)
        elif arg.type == bits.BOOL:
            fields.ready(column, [self._annotations.ready({arg.key: value}) for value in (False, True)])
        elif arg.type == bits.F64:
            fields.double(arg.key, column)
        elif arg.type in _UNSIGNED:
            fields.unsigned(arg.key, column)
        else:
            fields.signed(arg.key, column.view(np.int32) if arg.type == bits.SIGNED_U32 else column)
        fields.fields[-1] = fields.fields[-1]._replace(present=present, bit=bit)

    def _triple(self, fields: FieldList, arg: Arg, table: Table) -> None:
        x, y, z = (_column(table, name).astype(np.uint32).astype(np.uint64) for name in arg.columns)
        pairs = Interner()
        number = pairs.intern(x << np.uint64(32) | y)
        triples = Interner()
        place = triples.intern(number.astype(np.uint64) << np.uint64(32) | z)
        known = pairs.keys().tolist()
        values = [
            (known[key >> 32] >> 32, known[key >> 32] & 0xFFFFFFFF, key & 0xFFFFFFFF) for key in triples.keys().tolist()
        ]
        signed = [[value - (value >> 31 << 32) for value in triple] for triple in values]
        fields.ready(place, [self._annotations.ready({arg.key: triple}) for triple in signed])

    # ---- rows that are not activities

    def _others(self, table: Table) -> list[PacketPart]:
        phase = table["phase"]
        parts = []
        complete = np.flatnonzero(phase == ord("X"))
        if len(complete):
            rows = table.take(complete)
            parts.append(self._part(rows, SLICE, rows.end()))
        begin, end = self._pairs_of(table)
        if len(begin):
            rows = table.take(begin)
            parts.append(self._part(rows, SLICE, table["start"][end]))
        instants = np.flatnonzero(np.isin(phase, _INSTANTS))
        if len(instants):
            parts.append(self._part(table.take(instants), INSTANT, table["start"][instants]))
        foreign = (phase == ord("C")) & ~gap_rows(table, self._strings)  # gaps are made of the table `counter`
        parts += self._counters(table.take(np.flatnonzero(foreign)))
        kept = ~np.isin(phase, [*map(ord, "XC"), *_INSTANTS])
        kept[begin] = kept[end] = False
        if kept.any():
            self.kept.append(table.take(np.flatnonzero(kept)))
        hidden = phase[kept & (phase != ord("M"))]
        if len(hidden):
            kinds = "".join(sorted(chr(value) for value in unique_values(hidden).tolist()))
            self.notes.append(
                f"kept in the file, but not shown by viewers: {times(len(hidden), 'event')} of the phases {kinds}"
            )
        return parts

    def _pairs_of(self, table: Table) -> tuple[Ints, Ints]:
        """Returns the rows of begins and of their ends (phases B and E), matched per thread and level."""
        rows = np.flatnonzero(np.isin(table["phase"], _PAIR))
        if not len(rows):
            return rows, rows
        track = self.tracks_of(table)[rows]
        rows = rows[np.lexsort((table.origin["place"][rows], table["start"][rows], track))]
        track = self.tracks_of(table)[rows]
        begins = table["phase"][rows] == ord("B")
        level = np.cumsum(np.where(begins, 1, -1)) + ~begins  # an end has the level of its begin
        order = np.lexsort((np.arange(len(rows)), level, track))
        first, second = order[:-1], order[1:]
        fits = begins[first] & ~begins[second] & (level[first] == level[second]) & (track[first] == track[second])
        return rows[first[fits]], rows[second[fits]]

    def _counters(self, table: Table) -> list[PacketPart]:
        """Returns one track for each counter and each member of its arguments; those of one member are read back."""
        if not len(table):
            return []
        values: dict[tuple[int, int, str], list[tuple[int, float]]] = {}
        members = {
            number: self._members(number) for number in used_numbers(table.origin["args"], len(self._strings)).tolist()
        }
        columns = zip(
            self.tracks_of(table).tolist(),
            table["name"].tolist(),
            table.origin["args"].tolist(),
            table["start"].tolist(),
            strict=True,
        )
        counters: list[tuple[int, int]] = []
        single: dict[tuple[int, int], bool] = {}
        for track, name, args, start in columns:
            found = {key: value for key, value in members.get(args, {}).items() if _is_number(value)}
            for key, value in found.items():
                values.setdefault((track, name, key), []).append((start, value))
            counters.append((track, name))
            single[track, name] = single.get((track, name), True) and len(found) == len(members.get(args, {})) == 1
        kept = np.array([not single[counter] for counter in counters], np.bool_)
        if kept.any():
            self.kept.append(table.take(np.flatnonzero(kept)))
        parts = []
        for (track, name, key), points in values.items():
            title = self._strings[name] if name >= 0 else "counter"
            shown = title if key in ("value", title) else f"{title} {key}"
            number = self._tracks.counter(track, shown, Counter())
            if single[track, name]:
                self.ids[number] = [*self.ids[track], json.dumps(title), json.dumps(key)]
            start = np.array([point[0] for point in points], np.int64)
            amounts = [point[1] for point in points]
            whole = all(isinstance(value, int) and abs(value) < 2**63 for value in amounts)
            parts.append(counter_part(start, np.array(amounts, np.int64 if whole else np.float64), number))
        return parts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _column(table: Table, name: str) -> AnyArray:
    """Returns the column of an argument; for ops without a column of external ids, their ids."""
    found = table.origin.get(name)
    found = table.columns.get(name) if found is None else found
    return np.ascontiguousarray(table.columns["id"] if found is None else found)
