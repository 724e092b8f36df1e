"""Decodes captured CUDA graphs ("graph_nodes/1") into the tables graph_node and graph_op.

Theory of operation
    The graphs lie one after the other in the buffers, each with its own nodes, operators and texts. They come from the
    target: a graph whose sizes or numbers contradict each other is dropped, and so is everything after it, because the
    beginning of the next one is unknown. So is one whose operators are nested deeper than the agent records, or whose
    texts overlap: a few bytes would become very many.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from kineto_agent.protocol.records import (
    GRAPH_HEAD,
    GRAPH_MAGIC,
    GRAPH_NODE_FIELDS,
    GRAPH_NODES_FORMAT,
    GRAPH_NONE,
    GRAPH_OP_FIELDS,
)

from kineto_trace.base.array_types import AnyArray, Ints
from kineto_trace.base.quantities import times
from kineto_trace.base.visible_text import visible
from kineto_trace.decode import activity_names
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow, record_dtype
from kineto_trace.decode.torch.torch_ops import UnreadableInputs, inputs_text
from kineto_trace.model.trace import NO_ROW, NO_STRING, StringTable, Table, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT = GRAPH_NODES_FORMAT
_NODE, _OP = record_dtype(GRAPH_NODE_FIELDS), record_dtype(GRAPH_OP_FIELDS)
_LENGTH = struct.Struct("<I")
_MOST_REASONS = 4
_MOST_DEPTH = 128  # of nested operators: DEPTH_MOST of capture_watch.c


class _Damaged(ValueError):
    """The bytes are not a graph."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """One captured graph as it was handed over."""

    nodes: AnyArray
    ops: AnyArray
    texts: bytes

    def text(self, place: int) -> bytes:
        """Returns the text that begins there. Raises _Damaged."""
        if place + _LENGTH.size > len(self.texts):
            raise _Damaged
        (length,) = _LENGTH.unpack_from(self.texts, place)
        text = self.texts[place + _LENGTH.size : place + _LENGTH.size + length]
        if len(text) != length:
            raise _Damaged
        return text


def decode(source: RawSource, strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all graphs of a source; names and inputs go into `strings`."""
    data = b"".join(source.buffers())
    reader = _Reader(strings, source.metadata.get("dtypes"))
    undecoded = 0
    try:
        for graph in _graphs(data):
            reader.add(graph)
    except _Damaged:
        undecoded = 1
    warnings = [
        f"the operators of {times(count, 'captured CUDA graph')} are unknown: {reason}"
        for reason, count in _left_out(source.metadata)
    ]
    return Decoded(tables=reader.tables(), records=reader.graphs, undecoded=undecoded, warnings=tuple(warnings))


def _left_out(metadata: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Counts the graphs without capture data, by reason."""
    found = metadata.get("left_out")
    pairs = found.items() if isinstance(found, dict) else ()
    valid = [(visible(str(reason))[:200], count) for reason, count in pairs if isinstance(count, int) and count > 0]
    return valid[:_MOST_REASONS]


def _graphs(data: bytes) -> Iterator[_Graph]:
    """Yields the graphs. Raises _Damaged."""
    at = 0
    while at < len(data):
        if at + GRAPH_HEAD.size > len(data):
            raise _Damaged
        magic, size, nodes, ops, text_bytes, _ = GRAPH_HEAD.unpack_from(data, at)
        parts = (GRAPH_HEAD.size, nodes * _NODE.itemsize, ops * _OP.itemsize, text_bytes)
        if magic != GRAPH_MAGIC or size != sum(parts) or at + size > len(data):
            raise _Damaged
        of_ops = at + parts[0] + parts[1]
        yield _Graph(
            np.frombuffer(data, _NODE, nodes, at + parts[0]),
            np.frombuffer(data, _OP, ops, of_ops),
            data[of_ops + parts[2] : at + size],
        )
        at += size


class _Reader:
    """Collects the columns of both tables."""

    def __init__(self, strings: StringTable, dtypes: object) -> None:
        self.graphs = 0
        self._strings = strings
        self._dtypes = [str(name) for name in dtypes] if isinstance(dtypes, list) else []
        self._nodes: list[dict[str, Ints]] = []
        self._ops: list[dict[str, Ints]] = []
        self._op_rows = 0

    def add(self, graph: _Graph) -> None:
        """Adds one graph. Raises _Damaged, and then adds nothing of it."""
        ops = self._op_columns(graph)
        operator = _numbers(graph.nodes["op"])
        if (operator >= len(graph.ops)).any():
            raise _Damaged
        names = self._texts(graph, graph.nodes["name"], activity_names.demangle)
        nodes = {
            "graph": np.full(len(graph.nodes), self.graphs),
            "node": np.arange(len(graph.nodes)),
            "type": graph.nodes["type"].astype(np.int64),
            "name": names,
            **{f"{what}_{axis}": graph.nodes[what][:, place].astype(np.int64)
               for what in ("grid", "block") for place, axis in enumerate("xyz")},
            "operator": np.where(operator >= 0, operator + self._op_rows, NO_ROW),
        }  # fmt: skip
        self._nodes.append(nodes)
        self._ops.append(ops)
        self._op_rows += len(graph.ops)
        self.graphs += 1

    def _op_columns(self, graph: _Graph) -> dict[str, Ints]:
        parent = _numbers(graph.ops["parent"])
        if (parent >= np.arange(len(parent))).any():  # it would not be a tree
            raise _Damaged
        _check_depth(parent)
        return {
            "graph": np.full(len(parent), self.graphs),
            "name": self._texts(graph, graph.ops["name"], lambda text: text.decode("utf-8", "replace")),
            "parent": np.where(parent >= 0, parent + self._op_rows, NO_ROW),
            "scope": graph.ops["scope"].astype(np.int64) & 0xFF,
            "inputs": self._texts(graph, graph.ops["inputs"], self._inputs),
        }

    def _inputs(self, entry: bytes) -> str:
        try:
            return inputs_text(entry, self._dtypes)
        except UnreadableInputs as exc:
            raise _Damaged from exc

    def _texts(self, graph: _Graph, places: AnyArray, read: Any) -> Ints:
        """Returns the numbers of the texts; NO_STRING for none and for empty ones."""
        distinct, back = np.unique(places, return_inverse=True)
        numbers, left = [], len(graph.texts)
        for place in distinct.tolist():
            found = b"" if place == GRAPH_NONE else graph.text(place)
            left -= len(found)
            if left < 0:
                raise _Damaged
            text = read(found) if place != GRAPH_NONE else ""
            numbers.append(self._strings.add(text) if text else NO_STRING)
        chosen: Ints = np.array(numbers, np.int64)[back.reshape(-1)]
        return chosen

    def tables(self) -> dict[str, Table]:
        """Returns the tables, without those that are empty."""
        found = {}
        for kind, parts in (("graph_node", self._nodes), ("graph_op", self._ops)):
            rows = sum(len(part["graph"]) for part in parts)
            if rows:
                columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                found[kind] = make_table(kind, rows, columns)
        return found


def _check_depth(parent: Ints) -> None:
    """Raises _Damaged if operators are nested deeper than the agent records."""
    above = parent
    for _ in range(_MOST_DEPTH):
        if (above == NO_ROW).all():
            return
        above = np.where(above == NO_ROW, NO_ROW, parent[above])
    raise _Damaged


def _numbers(column: AnyArray) -> Ints:
    """Returns the column with NO_ROW instead of GRAPH_NONE."""
    return np.where(column == GRAPH_NONE, NO_ROW, column.astype(np.int64))
