"""Reads the rows of Kineto's Chrome traces in blocks, and repairs text that is not valid JSON row by row.

Theory of operation
    The bytes hold one or more documents, each after the byte DOCUMENT (as in RFC 7464). A document's head precedes its
    rows and contains the time that all others are relative to. Kineto puts ROW_END between two rows and nowhere else (a
    name has no line breaks), so blocks of whole rows can be cut from the text without parsing it; a block becomes one
    JSON array. Text of another form is kept until its document ends and parsed as a whole.
    If a block cannot be parsed, its rows are parsed in groups of GROUP, then one by one. Torch up to 2.13 does not
    escape the quotes in names: such a row has its name on a line of its own, which is repaired. If only the arguments
    of a row cannot be parsed, they are left out. Rows that remain unreadable are counted, as is a truncated row.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

DOCUMENT = b"\x1e"
BLOCK_BYTES = 4 << 20
GROUP = 64  # rows
ROW_END = b"\n  },\n  {"
_ROW_CLOSE = len(b"\n  }")
_ROW_OPEN = len(b"\n  },")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_DEVICES = re.compile(r'"deviceProperties"\s*:\s*')
_EVENTS_END = b"\n  ]"
_NAME_LINE = re.compile(rb'^( *"name": ")(.*)(", *)$', re.MULTILINE)
_BARE_QUOTE = re.compile(rb'(?<!\\)"')
_ARGUMENTS = re.compile(rb',\s*"args": \{.*\Z', re.DOTALL)
_NO_ARGUMENTS = msgspec.Raw(b"{}")


class Row(msgspec.Struct, gc=False):
    """One row. Times are microseconds after the document's base; tid is a text in rows that belong to no thread.

    pid: of rows on a device, the number of that.
    """

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    id: int | str = 0
    args: msgspec.Raw = _NO_ARGUMENTS


class _Whole(msgspec.Struct):
    traceEvents: list[Row]  # the name in the format


@dataclass(slots=True)
class Damage:
    """Counts what could not be read."""

    rows: int = 0
    arguments: int = 0  # rows whose arguments alone were unreadable
    documents: int = 0  # documents without any row


@dataclass(slots=True)
class Document:
    """One document while it is read. base_ns is Unix ns; it and the devices are valid when the document's rows arrive.

    devices: Kineto's deviceProperties.
    """

    base_ns: int = 0
    devices: list[dict[str, Any]] = field(default_factory=list)
    whole: bool = False  # whether its end was read


_head = json.JSONDecoder()
_rows = msgspec.json.Decoder(list[Row])
_row = msgspec.json.Decoder(Row)
_whole = msgspec.json.Decoder(_Whole)


def thread_ids(rows: Iterable[Row]) -> npt.NDArray[np.uint32]:
    """Returns the system thread ids; 0 for rows with a text instead."""
    return np.array([row.tid & 0xFFFFFFFF if isinstance(row.tid, int) else 0 for row in rows], np.uint32)


def documents(buffers: Iterable[bytes], damage: Damage) -> Iterator[tuple[Document, Iterator[list[Row]]]]:
    """Yields each document and its rows in blocks. Read each document to its end before requesting the next one."""
    feed = _Feed(buffers)
    while feed.next_document():
        document = Document()
        yield document, _blocks(feed, document, damage)


class _Feed:
    """Provides the bytes of one document at a time."""

    def __init__(self, buffers: Iterable[bytes]) -> None:
        self._buffers = iter(buffers)
        self._rest = b""
        self._over = False

    def next_document(self) -> bool:
        """Tells whether there is another document; data before the first mark counts as one too."""
        while not self._rest.strip(b" \n") and not self._over:
            self._pull()
        self._rest = self._rest.removeprefix(DOCUMENT)
        return bool(self._rest) or not self._over

    def _pull(self) -> None:
        data = next(self._buffers, None)
        self._over = data is None
        self._rest += data or b""

    def parts(self) -> Iterator[bytes]:
        """Yields the rest of this document."""
        while True:
            end = self._rest.find(DOCUMENT)
            if end >= 0:
                part, self._rest = self._rest[:end], self._rest[end:]
                yield part
                return
            part, self._rest = self._rest, b""
            yield part
            if self._over:
                return
            self._pull()


def _blocks(feed: _Feed, document: Document, damage: Damage) -> Iterator[list[Row]]:
    text = bytearray()
    in_head = True
    for part in feed.parts():
        text += part
        if in_head:
            found = _EVENTS.search(text)
            if found is None:
                continue
            in_head = False
            base = _BASE.search(text, 0, found.start())
            document.base_ns = int(base.group(1)) if base else 0
            document.devices = _devices(text[: found.start()].decode("utf-8", "replace"))
            del text[: found.end()]
        if len(text) >= BLOCK_BYTES:
            cut = text.rfind(ROW_END)
            if cut >= 0:
                yield _read(bytes(memoryview(text)[: cut + _ROW_CLOSE]), damage)
                del text[: cut + _ROW_OPEN]
    if in_head:
        damage.documents += bool(text.strip())
        return
    yield _read_last(bytes(text), document, damage)


def _devices(head: str) -> list[dict[str, Any]]:
    """Returns Kineto's deviceProperties; nothing where there are none that can be read."""
    found = _DEVICES.search(head)
    if found is None:
        return []
    try:
        devices, _end = _head.raw_decode(head, found.end())
    except (ValueError, RecursionError):
        return []
    return [each for each in devices if isinstance(each, dict)] if isinstance(devices, list) else []


def _read_last(text: bytes, document: Document, damage: Damage) -> list[Row]:
    """Reads the last rows of a document and the text after them."""
    end = text.rfind(_EVENTS_END)
    if end >= 0:
        document.whole = True
        return _read(text[:end], damage)
    try:
        rows = _whole.decode(b'{"traceEvents":[' + text).traceEvents
    except msgspec.DecodeError:
        return _read(text, damage)
    base = _BASE.search(text)
    document.base_ns = document.base_ns or (int(base.group(1)) if base else 0)
    document.whole = True
    return rows


def _read(block: bytes, damage: Damage) -> list[Row]:
    rows = _decoded(_rows, b"[" + block + b"]")
    if rows is not None:
        return list(rows)
    texts = block.split(ROW_END)
    texts = [
        (b"{" if number else b"") + text + (b"\n  }" if number + 1 < len(texts) else b"")
        for number, text in enumerate(texts)
    ]
    found: list[Row] = []
    for first in range(0, len(texts), GROUP):
        group = texts[first : first + GROUP]
        rows = _decoded(_rows, b"[" + b",".join(group) + b"]")
        found += rows if rows is not None else _read_each(group, damage)
    return found


def _read_each(texts: list[bytes], damage: Damage) -> Iterator[Row]:
    for text in texts:
        row = _decoded(_row, text) or _decoded(_row, _mended(text))
        if row is None:
            row = _decoded(_row, _ARGUMENTS.sub(b"}", _mended(text)))
            damage.arguments += row is not None
        if row is None:
            damage.rows += bool(text.strip())
        else:
            yield row


def _mended(text: bytes) -> bytes:
    """Escapes the quotes in the row's name, and replaces everything that is not UTF-8."""
    text = text.decode("utf-8", "replace").encode()
    return _NAME_LINE.sub(lambda line: line[1] + _BARE_QUOTE.sub(rb'\\"', line[2]) + line[3], text, count=1)


def _decoded(decoder: Any, text: bytes) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
