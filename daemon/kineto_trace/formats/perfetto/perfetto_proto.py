"""Messages of Perfetto's trace format that are built one at a time: tracks, interned texts, ready-made annotations.

Field numbers are those of Perfetto's public protos (trace_packet.proto, track_event.proto, track_descriptor.proto,
debug_annotation.proto, interned_data.proto, clock_snapshot.proto).

Theory of operation
    Each track has its texts in the file once and then refers to them by id. The id of a name or category is its number
    plus one. The lowest bit of an annotation text's `text_id` says whether the text is JSON: a list or an object among
    the row's arguments is shown as its JSON text, and a reader must distinguish it from a plain text that looks like
    one.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kineto_trace.model.trace import StringTable

TRACK_CLOCK = 64  # the first number of clocks that belong to a sequence
BOOT_CLOCK, REAL_CLOCK = 6, 1
CLEARED = 1  # PACKET_FLAGS: earlier interned data is no longer valid
UNIT_UNSPECIFIED, UNIT_COUNT, UNIT_BYTES = 0, 2, 3  # of counters
EXPLICIT_ORDER = 3  # child_ordering: by sibling_order_rank
KEPT_ROWS = 24301  # of ChromeEventBundle: a field of ours, which other readers skip
_PACKET = b"\x0a"


def varint(value: int) -> bytes:
    """Encodes an unsigned number, or the two's complement of a negative one."""
    value &= 0xFFFFFFFFFFFFFFFF
    done = bytearray()
    while value > 127:
        done.append(value & 127 | 128)
        value >>= 7
    done.append(value)
    return bytes(done)


def number(field: int, value: int) -> bytes:
    """Encodes a field that is a number."""
    return varint(field << 3) + varint(value)


def data(field: int, content: bytes | str) -> bytes:
    """Encodes a field that is a message, bytes or a text."""
    content = utf8(content) if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(content)) + content


def utf8(text: str) -> bytes:
    """Encodes the text; characters that UTF-8 cannot encode become question marks."""
    return text.encode("utf-8", "replace")


def packet(*fields: bytes) -> bytes:
    """Encodes one packet of the trace."""
    content = b"".join(fields)
    return _PACKET + varint(len(content)) + content


# ------------------------------------------------------------ tracks


class Counter(NamedTuple):
    """What a counter track shows. unit: UNIT_COUNT or UNIT_BYTES; unit_name: any other unit, with UNIT_UNSPECIFIED."""

    unit: int = UNIT_COUNT
    unit_name: str = ""


class TrackInfo(NamedTuple):
    """A row of the viewer. uuid: of this track; parent: of the track above it, 0 if there is none.

    pid and tid: both for a thread, pid alone for a process, otherwise -1. rank: its order among its siblings.
    """

    uuid: int
    name: str
    parent: int = 0
    pid: int = -1
    tid: int = -1
    label: str = ""
    rank: int = 0
    counter: Counter | None = None


def track_packet(track: TrackInfo) -> bytes:
    """Returns the packet that describes a track."""
    fields = [number(1, track.uuid)]
    if track.parent:
        fields.append(number(5, track.parent))
    if track.tid >= 0:
        fields.append(data(4, number(1, track.pid) + number(2, track.tid) + data(5, track.name)))
    elif track.pid >= 0:
        fields.append(
            data(3, number(1, track.pid) + data(6, track.name) + (data(8, track.label) if track.label else b""))
        )
    else:
        fields.append(data(2, track.name))
    if track.counter is not None:
        fields.append(data(8, number(3, track.counter.unit) + _unit_name(track.counter)))
    fields += [number(11, EXPLICIT_ORDER), number(12, track.rank)]
    return packet(data(60, b"".join(fields)))


def _unit_name(counter: Counter) -> bytes:
    return data(6, counter.unit_name) if counter.unit_name else b""


def sequence_packet(sequence: int, uuid: int, start_ns: int, interned: bytes) -> bytes:
    """Returns the packet that begins a sequence: its clock with incremental times, its track and its texts."""
    clock = number(1, TRACK_CLOCK) + number(2, start_ns) + number(3, 1)
    boot = number(1, BOOT_CLOCK) + number(2, start_ns)
    defaults = number(58, TRACK_CLOCK) + data(11, number(11, uuid))
    return packet(
        data(6, data(1, boot) + data(1, clock)),
        number(10, sequence),
        data(12, interned),
        number(13, CLEARED),
        data(59, defaults),
    )


def clock_packet(time_ns: int) -> bytes:
    """Returns the packet that declares the file's times, which are Unix ns, to be on the boot clock.

    Viewers show times of that clock without conversion.
    """
    clocks = (data(1, number(1, clock) + number(2, time_ns)) for clock in (BOOT_CLOCK, REAL_CLOCK))
    return packet(data(6, b"".join(clocks)), number(10, 1))


def metadata_packet(name: str, text: str) -> bytes:
    """Returns a packet with a text about the whole trace."""
    return packet(data(5, data(2, data(1, name) + data(2, text))), number(10, 1))


def rows_packet(block: bytes) -> bytes:
    """Returns a packet with rows of a Chrome trace that have no form of their own (kept_rows.py)."""
    return packet(data(5, data(KEPT_ROWS, block)), number(10, 1))


# ------------------------------------------------------------ interned texts


def interned(
    categories: Iterable[tuple[int, str]],
    names: Iterable[tuple[int, str]],
    annotation_names: Iterable[tuple[int, str]],
    texts: Iterable[tuple[int, str]],
) -> bytes:
    """Returns the content of InternedData from (id, text)."""
    parts = []
    for field, entries in ((1, categories), (2, names), (3, annotation_names), (29, texts)):
        parts += [data(field, number(1, identity) + data(2, text)) for identity, text in entries]
    return b"".join(parts)


def text_id(place: int, is_json: bool) -> int:
    """Returns the id of a text value."""
    return 2 * (place + 1) + is_json


class Ready(NamedTuple):
    """Encoded annotations, and the ids of the names and of the text values that they refer to."""

    content: bytes
    names: frozenset[int]
    texts: frozenset[int]


NOTHING_READY = Ready(b"", frozenset(), frozenset())


class Annotations:
    """Encodes annotations and collects their texts."""

    def __init__(self) -> None:
        self._names, self._texts = StringTable(), StringTable()

    def name(self, text: str) -> int:
        """Returns the id of an annotation's name."""
        return self._names.add(text) + 1

    def name_texts(self, ids: Iterable[int]) -> list[tuple[int, str]]:
        """Returns (id, text) for these names."""
        return [(identity, self._names.strings[identity - 1]) for identity in sorted(ids)]

    def value_texts(self, ids: Iterable[int]) -> list[tuple[int, str]]:
        """Returns (id, text) for these text values."""
        return [(identity, self._texts.strings[identity // 2 - 1]) for identity in sorted(ids)]

    def ready(self, members: Mapping[str, Any]) -> Ready:
        """Returns annotations with the members of a JSON object."""
        content, texts = [], set()
        names = {name: self.name(name) for name in members}
        for name, value in members.items():
            body = number(1, names[name])
            if isinstance(value, bool):
                body += number(2, value)
            elif isinstance(value, int):
                body += self._integer(value)
            elif isinstance(value, float):
                body += varint(5 << 3 | 1) + struct.pack("<d", value)
            else:
                is_json = not isinstance(value, str)
                text = json.dumps(value, ensure_ascii=False) if is_json else value
                identity = text_id(self._texts.add(text), is_json)
                texts.add(identity)
                body += number(17, identity)
            content.append(data(4, body))
        return Ready(b"".join(content), frozenset(names.values()), frozenset(texts))

    def _integer(self, value: int) -> bytes:
        if -(2**63) <= value < 2**63:
            return number(4, value)
        if 0 <= value < 2**64:
            return number(3, value)
        return varint(5 << 3 | 1) + struct.pack("<d", float(value) if abs(value) < 2**1000 else float("inf"))

    def ready_text(self, members: str) -> Ready:
        """Returns annotations for the JSON text of an object's members, without braces; outer commas are ignored."""
        stripped = members.strip().strip(",")
        if not stripped:
            return NOTHING_READY
        try:
            found = json.loads("{" + stripped + "}", strict=False)
        except ValueError:
            found = {"arguments": members}
        return self.ready(found)
