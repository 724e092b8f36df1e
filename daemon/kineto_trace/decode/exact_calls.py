"""Decodes records of exact Python calls ("python_calls/1") into the table python_function.

Theory of operation
    A record is a call or a return; a return does not name the call it ends. Calls and returns of Python functions nest
    within a thread, so a return belongs to the last call at the same depth. A C function called by a Python function
    returns before that function does anything else, so its call and return are neighbours among the C records at the
    depth of that function. Sorting finds both, without a stack. A return whose call was before the recording has no
    partner and is dropped; a call without a return ends with its thread's part of the recording. A part is a thread's
    recording until it was cut (another profile function replaced ours).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kineto_agent.protocol.records import (
    CALL_CUT,
    CALL_FIRST,
    CALL_UNKNOWN,
    PYTHON_CALL_FIELDS,
    PYTHON_CALLS_FORMAT,
    SPACE_PYTHON_CALL,
)

from kineto_trace.base.array_types import AnyArray, Flags, Ints, Ints32
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow, fixed_records, record_dtype
from kineto_trace.model.trace import NO_MODULE, NO_ROW, StringTable, Table, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT = PYTHON_CALLS_FORMAT
RECORD = record_dtype(PYTHON_CALL_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Lookup tables by the number of a name: numbers into Trace.strings, and module numbers."""

    strings: Ints32
    modules: Ints32


def decode(source: RawSource, strings: StringTable, window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all buffers of a source; names go into `strings`."""
    records, cut = fixed_records(source, RECORD)
    names = _names(source, strings, int(records["name"].max(initial=0)))
    end_ns = max(window.end_ns, int(records["time"].max(initial=0)))
    table = _table(records, names, end_ns)
    return Decoded(tables={table.kind: table}, records=len(records), undecoded=cut)


def _names(source: RawSource, strings: StringTable, most: int) -> _Names:
    entries = source.strings.get(SPACE_PYTHON_CALL, {})
    size = max(most, CALL_FIRST, *entries) + 1 if entries else max(most, CALL_FIRST) + 1
    names = _Names(
        strings=np.full(size, strings.add("<unknown>"), np.int32),
        modules=np.full(size, NO_MODULE, np.int32),
    )
    prefixes = source.metadata.get("prefixes")
    folders = [str(folder) for folder in prefixes] if isinstance(prefixes, list) else []
    for number, entry in entries.items():
        kind, text = chr(entry[0]) if entry else "", entry[1:].decode("utf-8", "replace")
        first, *rest = text.split("\n", 2)
        if kind == "F" and len(rest) == 2:
            text = f"{_short(first, folders)}({rest[0]}): {rest[1]}"
        elif kind == "M" and rest and rest[0].isdecimal():
            text = f"nn.Module: {first}_{rest[0]}"
            names.modules[number] = int(rest[0]) & 0x7FFFFFFF
        names.strings[number] = strings.add(text)
    return names


def _short(path: str, folders: Sequence[str]) -> str:
    """Returns the file's path below the folder in which Python found it, as torch shows it."""
    return next((path.removeprefix(folder) for folder in folders if path.startswith(folder)), path)


def _table(records: AnyArray, names: _Names, end_ns: int) -> Table:
    records = records[np.argsort(records["thread"], kind="stable")]  # the records of each thread are in order already
    name, time = records["name"], records["time"]
    part = _parts(records)
    begins = name >= CALL_UNKNOWN
    partner = _partners(part, begins, name)
    calls = np.flatnonzero(begins)
    ends = _ends(records, part, partner, calls, end_ns)
    columns: dict[str, AnyArray] = {
        "start": time[calls],
        "duration": np.maximum(ends - time[calls], 0),
        "name": names.strings[name[calls]],
        "thread": records["thread"][calls],
        "module": names.modules[name[calls]],
    }
    depth = _depths(part, calls, partner, len(records))
    columns["depth"], columns["parent"] = depth, _parents(part[calls], depth)
    order = np.argsort(columns["start"], kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    columns["parent"] = np.where(columns["parent"] == NO_ROW, NO_ROW, place[columns["parent"]])
    return make_table("python_function", len(calls), {key: column[order] for key, column in columns.items()})


def _parts(records: AnyArray) -> Ints:
    """Returns a part number for each record: a new one for each thread, and after each cut."""
    if not len(records):
        return np.empty(0, np.int64)
    new = np.ones(len(records), np.int64)
    new[1:] = (records["thread"][1:] != records["thread"][:-1]) | (records["name"][:-1] == CALL_CUT)
    result: Ints = np.cumsum(new)
    return result


def _level(part: Ints, steps: Ints) -> Ints:
    """Returns the running sum of the steps within each part, including each record's own step."""
    total = np.cumsum(steps)
    first = np.flatnonzero(np.diff(part, prepend=0))
    result: Ints = total - (total[first] - steps[first])[part - 1]
    return result


def _partners(part: Ints, begins: Flags, name: AnyArray) -> Ints:
    """Returns for each call the record of its return; NO_ROW if there is none."""
    in_c = name & 1 == 1
    steps = np.where(begins, 1, -1)
    steps[in_c | (name == CALL_CUT)] = 0
    level = _level(part, steps)
    level -= level.min(initial=0)
    level += ~in_c & ~begins  # a return has the level of its call
    key = part * (int(level.max(initial=0)) + 1) + level
    partner = np.full(len(part), NO_ROW, np.int64)
    for chosen in (np.flatnonzero(~in_c & (name != CALL_CUT)), np.flatnonzero(in_c)):
        ordered = chosen[np.argsort(key[chosen], kind="stable")]
        first, second = ordered[:-1], ordered[1:]
        fits = begins[first] & ~begins[second] & (key[first] == key[second])
        partner[first[fits]] = second[fits]
    return partner


def _ends(records: AnyArray, part: Ints, partner: Ints, calls: Ints, end_ns: int) -> Ints:
    """Returns when each call ended. A call without a return ends with the recording, or when its thread was cut."""
    last = np.searchsorted(part, part[calls], side="right") - 1
    over = np.where(records["name"][last] == CALL_CUT, records["time"][last], end_ns)
    known = partner[calls] != NO_ROW
    result: Ints = np.where(known, records["time"][np.where(known, partner[calls], 0)], over)
    return result


def _depths(part: Ints, calls: Ints, partner: Ints, count: int) -> Ints32:
    steps = np.zeros(count, np.int64)
    steps[calls] = 1
    steps[partner[calls][partner[calls] != NO_ROW]] = -1
    return (_level(part, steps)[calls] - 1).astype(np.int32) if count else np.empty(0, np.int32)


def _parents(part: Ints, depth: Ints32) -> Ints32:
    """Returns the row of each call's caller: the last earlier call in the same part whose depth is one less."""
    parent = np.full(len(part), NO_ROW, np.int32)
    by_depth = np.argsort(depth, kind="stable")  # rows of one depth stay in order
    edges = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=-1)) + 2))
    for level in range(1, len(edges) - 1):
        above, rows = by_depth[edges[level - 1] : edges[level]], by_depth[edges[level] : edges[level + 1]]
        at = np.searchsorted(above, rows) - 1
        found = above[np.maximum(at, 0)]
        fits = (at >= 0) & (part[found] == part[rows])
        parent[rows[fits]] = found[fits]
    return parent
