"""Counts what is in a trace file, without any code of kineto_trace: Chrome JSON by Python's json, Perfetto by protobuf.

The counts of a file and of what was exported from it can be compared: they have the same keys.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal  # a float does not tell nanoseconds of Unix time apart
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Counts = Mapping[str, int]

# message -> its fields: (name, number, type, message of the field). Those of perfetto_trace.proto that are needed here.
_U64, _U32, _FIXED, _TEXT, _ENUM, _MESSAGE = 4, 13, 6, 9, 5, 11
_MESSAGES: dict[str, list[tuple[str, int, int, str]]] = {
    "Trace": [("packet", 1, _MESSAGE, "Packet")],
    "Packet": [
        ("sequence", 10, _U32, ""),
        ("event", 11, _MESSAGE, "Event"),
        ("interned", 12, _MESSAGE, "Interned"),
        ("track", 60, _MESSAGE, "Track"),
    ],
    "Event": [
        ("category_iid", 3, _U64, ""),
        ("type", 9, _ENUM, ""),
        ("category", 22, _TEXT, ""),
        ("flow", 47, _FIXED, ""),
        ("terminating_flow", 48, _FIXED, ""),
    ],
    "Interned": [("category", 1, _MESSAGE, "Text")],
    "Text": [("iid", 1, _U64, ""), ("name", 2, _TEXT, "")],
    "Track": [
        ("name", 2, _TEXT, ""),
        ("process", 3, _MESSAGE, "Process"),
        ("thread", 4, _MESSAGE, "Thread"),
    ],
    "Process": [("name", 6, _TEXT, "")],
    "Thread": [("name", 5, _TEXT, "")],
}
_REPEATED = {"Trace.packet", "Interned.category"} | {
    f"Event.{name}" for name in ("category_iid", "category", "flow", "terminating_flow")
}
_BEGIN, _INSTANT, _COUNTER = 1, 3, 4


def count_events(path: Path) -> Counts:
    """Returns the numbers of slices by category, instants, counters' values, arrows and, of Chrome traces, the rest."""
    return _of_perfetto(path) if path.name.endswith(".pftrace") else _of_chrome(chrome_document(path))


def arrow_ends(path: Path) -> set[str]:
    """Returns the categories of the slices of a Perfetto trace that are ends of arrows."""
    return {of for event, of in _events(path) if event.flow or event.terminating_flow}


def names(path: Path) -> set[str]:
    """Returns the names of processes and threads."""
    if path.name.endswith(".pftrace"):
        tracks = [packet.track for packet in _packets(path) if packet.HasField("track")]
        return {name for track in tracks for name in (track.name, track.process.name, track.thread.name) if name}
    found = {}
    for event in chrome_document(path)["traceEvents"]:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            thread = str(event["tid"]) if event["name"] == "thread_name" else ""
            found[str(event["pid"]), thread] = event["args"]["name"].strip()  # the last name counts
    return set(found.values()) - {""}


def chrome_document(path: Path) -> dict[str, Any]:
    """Returns a Chrome trace as an object. Raises ValueError if it is not valid JSON."""
    data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    found = json.loads(data.decode("utf-8", "replace"), strict=False)
    return found if isinstance(found, dict) else {"traceEvents": found}


def _of_chrome(document: Mapping[str, Any]) -> Counts:
    events = document["traceEvents"]
    found: Counter[str] = Counter()
    for event in events:
        phase = event.get("ph")
        if phase == "X":
            found[f"slices of {event.get('cat', '')}"] += 1
        elif phase in ("i", "I", "R"):
            found["instants"] += 1
        elif phase in ("s", "t", "f"):
            found[f"flow events of phase {phase}"] += 1
        elif phase == "M":
            found[f"metadata {event.get('name')}"] += 1
        else:
            found[f"events of phase {phase}"] += 1
            found["counter values"] += phase == "C" and sum(map(_is_number, event.get("args", {}).values()))
    found["arrows"] = _arrows(events)
    return +found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _arrows(events: Iterable[Mapping[str, Any]]) -> int:
    """Returns how often a flow goes on or ends after its start or a step."""
    flows: dict[tuple[str, str], list[tuple[Decimal, bool, str]]] = defaultdict(list)
    for event in events:
        if event.get("ph") in ("s", "t", "f"):
            key = str(event.get("cat")), str(event.get("id"))
            flows[key].append((Decimal(str(event["ts"])), event["ph"] == "f", event["ph"]))
    number = 0
    for ends in flows.values():
        open_ = False
        for _time, _last, phase in sorted(ends):
            number += open_ and phase != "s"
            open_ = open_ or phase != "f"
    return number


def _packets(path: Path) -> Iterable[Any]:
    packets: Iterable[Any] = _message("Trace").FromString(path.read_bytes()).packet
    return packets


def _events(path: Path) -> Iterator[tuple[Any, str]]:
    """Yields the events of a Perfetto trace with their categories."""
    categories: dict[tuple[int, int], str] = {}
    for packet in _packets(path):
        for text in packet.interned.category:
            categories[packet.sequence, text.iid] = text.name
        if packet.HasField("event"):
            of = [categories[packet.sequence, number] for number in packet.event.category_iid]
            yield packet.event, ",".join([*of, *packet.event.category])


def _of_perfetto(path: Path) -> Counts:
    found: Counter[str] = Counter()
    ends: Counter[int] = Counter()
    for event, of in _events(path):
        found[f"slices of {of}"] += event.type == _BEGIN
        found["instants"] += event.type == _INSTANT
        found["counter values"] += event.type == _COUNTER
        ends.update([*event.flow, *event.terminating_flow])
    found["arrows"] = sum(number == 2 for number in ends.values())
    found["arrows without two ends"] = sum(number != 2 for number in ends.values())
    return +found


@cache
def _message(name: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="counted.proto", package="counted", syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for field, number, kind, of in fields:
            label = 3 if f"{message}.{field}" in _REPEATED else 1
            added = described.field.add(name=field, number=number, type=kind, label=label)
            if of:
                added.type_name = f".counted.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"counted.{name}"))
