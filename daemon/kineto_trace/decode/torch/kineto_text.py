"""Reads the rows of Kineto's Chrome traces in blocks, and repairs text that is not valid JSON row by row.

Theory of operation
    The bytes hold one or more documents, each after the byte DOCUMENT (as in RFC 7464). A document's head precedes its
    rows and contains the time that all others are relative to. Kineto puts ROW_END between two rows and nowhere else (a
    name has no line breaks), so blocks of whole rows can be cut from the text without parsing it; a block becomes one
    JSON array. Text of another form is kept until its document ends and parsed as a whole.
    If a block cannot be parsed, its rows are parsed in groups of GROUP, then one by one. Torch up to 2.13 does not
    escape the quotes in names: such a row has its name on a line of its own, which is repaired. If only the arguments
    of a row cannot be parsed, they are dropped. Rows that remain unreadable are counted, as is a truncated row.

Decodes exact Python calls as Kineto writes them into the table python_function.

A row names its caller by an id that is valid within one document. If only calls of modules are wanted (the program's
functions are then sampled), a call's caller is the nearest enclosing module.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kineto_trace.base.array_types import AnyArray, Flags, Ints, Ints32, UInts32
from kineto_trace.model.trace import NO_MODULE, NO_ROW, Table, make_table

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
_head = json.JSONDecoder()
MAX_DEPTH = 4096  # calls; deeper chains are rejected
_NO_ID = -1


class Row(msgspec.Struct, gc=False):
    """One row. Times are microseconds after the document's base; tid is a text in rows that belong to no thread.

    pid: for rows on a device, the device number.
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


_rows = msgspec.json.Decoder(list[Row])
_row = msgspec.json.Decoder(Row)


class _Whole(msgspec.Struct):
    traceEvents: list[Row]  # the name in the format


_whole = msgspec.json.Decoder(_Whole)


@dataclass(slots=True)
class Damage:
    """Counts unreadable rows and documents."""

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


class _Feed:
    """Provides the bytes of one document at a time."""

    def __init__(self, buffers: Iterable[bytes]) -> None:
        self._buffers = iter(buffers)
        self._rest = b""
        self._over = False

    def next_document(self) -> bool:
        """Returns whether there is another document; data before the first mark counts as one too."""
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


class _CallArgs(msgspec.Struct, gc=False):
    id: int | None = msgspec.field(name="Python id", default=None)
    parent: int | None = msgspec.field(name="Python parent id", default=None)
    module: int | None = msgspec.field(name="Python module id", default=None)


_args = msgspec.json.Decoder(list[_CallArgs])
_one = msgspec.json.Decoder(_CallArgs)


class PythonCalls:
    """Collects the calls of all documents."""

    def __init__(self, *, modules_only: bool) -> None:
        self._modules_only = modules_only
        self._parts: list[dict[str, AnyArray]] = []  # of the current document
        self._documents: list[dict[str, AnyArray]] = []
        self._rows = 0

    def add(self, rows: list[Row], times: Mapping[str, AnyArray], names: list[int]) -> None:
        """Adds rows, with their times in ns after the document's base, and the numbers of their names."""
        if not rows:
            return
        args = decoded_arguments(_args, _one, [bytes(row.args) for row in rows], _CallArgs(), Damage())
        self._parts.append(
            {
                **times,
                "name": np.array(names, np.int32),
                "thread": thread_ids(rows),
                "id": np.array([_NO_ID if arg.id is None else arg.id for arg in args], np.int64),
                "parent": np.array([_NO_ID if arg.parent is None else arg.parent for arg in args], np.int64),
                "module": np.array([NO_MODULE if arg.module is None else arg.module for arg in args], np.int32),
            }
        )

    def end_document(self, base_ns: int) -> None:
        """Completes the document whose rows were added since the previous one. base_ns: its base, in Unix ns."""
        if not self._parts:
            return
        joined = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        self._parts = []
        joined["start"] += base_ns
        joined["parent"] = parent_rows(joined.pop("id"), joined["parent"])
        if self._modules_only:
            joined = _only(joined, joined["module"] != NO_MODULE)
        joined["depth"] = depths(joined["parent"])
        joined["parent"] = np.where(joined["parent"] == NO_ROW, NO_ROW, joined["parent"] + self._rows)
        self._rows += len(joined["start"])
        self._documents.append(joined)

    def table(self) -> Table:
        """Returns all calls. They were not sampled: `samples` is 0."""
        if not self._documents:
            return make_table("python_function", 0, {})
        columns = {
            name: np.concatenate([document[name] for document in self._documents]) for name in self._documents[0]
        }
        return make_table("python_function", self._rows, columns)


def thread_ids(rows: Iterable[Row]) -> UInts32:
    """Returns the system thread ids; 0 for rows with a text instead."""
    return np.array([row.tid & 0xFFFFFFFF if isinstance(row.tid, int) else 0 for row in rows], np.uint32)


def documents(buffers: Iterable[bytes], damage: Damage) -> Iterator[tuple[Document, Iterator[list[Row]]]]:
    """Yields each document and its rows in blocks. Read each document to its end before requesting the next one."""
    feed = _Feed(buffers)
    while feed.next_document():
        document = Document()
        yield document, _blocks(feed, document, damage)


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
    """Returns Kineto's deviceProperties; empty if they are missing or unreadable."""
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
    whole: _Whole | None = _decoded(_whole, b'{"traceEvents":[' + text)
    if whole is None:
        return _read(text, damage)
    base = _BASE.search(text)
    document.base_ns = document.base_ns or (int(base.group(1)) if base else 0)
    document.whole = True
    return whole.traceEvents


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parent_rows(ids: Ints, parents: Ints) -> Ints:
    """Returns the rows of the callers; NO_ROW for callers without a row."""
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids, parents, sorter=order), len(ids) - 1)
    found = order[at]
    known = (ids[found] == parents) & (parents != _NO_ID) & (found != np.arange(len(ids)))
    return np.where(known, found, NO_ROW)


def _only(columns: Mapping[str, AnyArray], kept: Flags) -> dict[str, AnyArray]:
    """Selects the kept rows; the caller of each becomes its nearest kept ancestor."""
    parent = columns["parent"].copy()
    for _ in range(MAX_DEPTH):
        through = np.flatnonzero((parent != NO_ROW) & ~kept[parent])
        if not len(through):
            break
        parent[through] = columns["parent"][parent[through]]
    parent[(parent != NO_ROW) & ~kept[parent]] = NO_ROW
    row = np.cumsum(kept) - 1
    result = {name: column[kept] for name, column in columns.items()}
    result["parent"] = np.where(parent[kept] == NO_ROW, NO_ROW, row[parent[kept]])
    return result


def depths(parent: Ints) -> Ints32:
    """Returns how many callers each row has.

    Endless chains are cut at MAX_DEPTH: their rows lose their callers.
    """
    depth = np.zeros(len(parent), np.int32)
    rows = np.flatnonzero(parent != NO_ROW)
    above = parent[rows]
    while len(rows):
        depth[rows] += 1
        above = parent[above]
        going = above != NO_ROW
        rows, above = rows[going], above[going]
        if len(rows) and depth[rows[0]] >= MAX_DEPTH:
            parent[rows] = NO_ROW
            depth[rows] = 0
            break
    return depth


def decoded_arguments(all_: Any, one: Any, texts: Sequence[bytes], otherwise: Any, damage: Damage) -> list[Any]:
    """Returns the arguments of each row, or `otherwise` for those that cannot be decoded, which `damage` counts.

    all_, one: decoders of a list of arguments, and of those of one row.
    """
    found = _decoded(all_, b"[" + b",".join(texts) + b"]")
    if found is not None:
        return list(found)
    each = [_decoded(one, text) for text in texts]
    damage.arguments += each.count(None)
    return [otherwise if arguments is None else arguments for arguments in each]
