"""Finds the operators that added the nodes of the CUDA graphs replayed in the trace.

Theory of operation
    A replay runs no operator: the owners of its kernels were recorded when the graph was captured (the tables
        graph_node and graph_op, from the agent). CUPTI's id of a node has the id of the instantiated graph in its upper
        half, and in its lower half the node's number in the order of the capture, which instantiation keeps. A graph of
        the trace is a captured one if it has all its kernels, at the same places, with the same names and launch
        shapes, and no kernels in other places. Copies and fills need not be recorded, and are the driver's own kernels
        if the graph was instantiated before CUPTI was loaded.

    If several captured graphs fit, they must agree on the operator of every node; otherwise nothing is attributed. Work
    that is not attributed here belongs to the launcher of the graph, as usual.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Flags, Ints, Ints8, Ints32
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, NO_ROW, NO_STRING, Trace

KNOWN = "known from the graph's capture"
NOT_SEEN = "not known: the agent saw no capture of a CUDA graph"
DIFFERENT = "not known: no captured graph has these nodes"
CHANGED = "not known: the graph was changed between replays"
AMBIGUOUS = "not known: captured graphs with these nodes differ in their operators"

CAPTURED_OP = "captured_op"

_SHAPE = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
_TYPES = {"kernel": 0, "gpu_memcpy": 1, "gpu_memset": 2}  # CUgraphNodeType
_DRIVERS_OWN = re.compile(r"mem(?:cpy|set)\w*$")
_NODE_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class CapturedGraphs:
    """What is known about the graphs of the trace.

    node: by GPU table, for each row the row of graph_node that it ran, or NO_ROW.
    state: by CUPTI's graph id one of KNOWN, NOT_SEEN, DIFFERENT, CHANGED, AMBIGUOUS.
    shapes: ids of known graphs whose operators' inputs are unambiguous, too.
    """

    node: Mapping[str, Ints]
    state: Mapping[int, str]
    shapes: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Work:
    """The activities of graphs. kind: CUgraphNodeType; what: name and launch shape; own: the driver's copy or fill."""

    table: Ints8
    row: Ints
    graph: Ints
    node: Ints
    kind: Ints
    what: Ints32
    own: Flags

    def take(self, rows: AnyArray) -> "_Work":
        """Returns these rows."""
        return _Work(*(getattr(self, name)[rows] for name in self.__slots__))


class _Alike(NamedTuple):
    """Captured graphs with indistinguishable replays: the first of them, and all possible operators of their nodes."""

    graph: _Work
    paths: set[bytes]
    inputs: set[bytes]


def captured_graphs(context: Context) -> CapturedGraphs:
    """Returns which nodes of captured graphs the GPU activities of the trace ran."""
    found = {name: np.full(len(context.trace.table(name)), NO_ROW, np.int64) for name in GPU_TABLES}
    if not len(context.trace.table("graph_node")):
        return CapturedGraphs(found, dict.fromkeys(_graph_ids(context), NOT_SEEN), frozenset())
    captured = _captured(context)
    runs = [captured.take(rows) for rows in _runs(captured.graph)]
    graphs = [run for run in runs if np.array_equal(run.node, np.arange(len(run.node)))]  # with all nodes, in order
    by_kernels = _alike(context, graphs)
    largest = max((len(graph.node) for graph in graphs), default=0)
    state: dict[int, str] = {}
    shapes = []
    for number, mine in _replayed(context).items():
        if mine.node.max() >= largest:
            state[number] = DIFFERENT
            continue
        first = _first_of_each(mine.node)
        once = mine.take(first[first != NO_ROW])
        fits = [alike for alike in by_kernels.get(_kernels(once), {}).values() if _has_others(alike.graph, once)]
        if not _is_constant(mine, first):
            state[number] = CHANGED
        elif not fits:
            state[number] = DIFFERENT
        elif _several(alike.paths for alike in fits):
            state[number] = AMBIGUOUS
        else:
            state[number] = KNOWN
            if not _several(alike.inputs for alike in fits):
                shapes.append(number)
            rows = fits[0].graph.row[mine.node]
            for table, name in enumerate(GPU_TABLES):
                own = mine.table == table
                found[name][mine.row[own]] = rows[own]
    return CapturedGraphs(found, state, frozenset(shapes))


def captured_operators(context: Context) -> dict[str, Ints]:
    """Returns by GPU table, for each row, the row of graph_op that added it to its CUDA graph, or NO_ROW."""
    operator = np.append(context.trace.table("graph_node")["operator"].astype(np.int64), NO_ROW)
    return {name: operator[node] for name, node in context.get(captured_graphs).node.items()}


def captured_columns(trace: Trace) -> dict[str, dict[str, Ints32]]:
    """By GPU table the column CAPTURED_OP: for each row the name of its operator; NO_STRING: none. None at all: {}."""
    names = np.append(trace.table("graph_op")["name"].astype(np.int32), NO_STRING)
    found = Context(trace).get(captured_operators) if len(names) > 1 else {}
    return {kind: {CAPTURED_OP: names[row]} for kind, row in found.items() if (row != NO_ROW).any()}


def _graph_ids(context: Context) -> list[int]:
    """Returns CUPTI's ids of the graphs of the trace."""
    tables = [context.trace.table(name) for name in GPU_TABLES]
    ids = [unique_values(table["graph_id"]) for table in tables if "graph_id" in table.columns]
    return [number for number in unique_values(np.concatenate(ids)).tolist() if number]


def _runs(values: Ints) -> list[Ints]:
    """Returns the places of each run of equal values."""
    return np.split(np.arange(len(values)), np.flatnonzero(np.diff(values)) + 1) if len(values) else []


def _replayed(context: Context) -> dict[int, _Work]:
    """Returns the activities of each graph of the trace."""
    own = np.append(matches(context.trace.strings, _DRIVERS_OWN), False)
    parts: dict[int, list[_Work]] = {}
    for place, name in enumerate(GPU_TABLES):
        table = context.trace.table(name)
        if name not in _TYPES or "graph_id" not in table.columns:
            continue
        rows = np.flatnonzero(table["graph_id"])
        rows = rows[np.argsort(table["graph_id"][rows], kind="stable")]
        for run in _runs(table["graph_id"][rows]):
            row = rows[run]
            columns = [table[column][row] for column in ("name", *_SHAPE)] if name == "kernel" else []
            part = _Work(
                table=np.full(len(row), place, np.int8),
                row=row,
                graph=table["graph_id"][row].astype(np.int64),
                node=(table["graph_node_id"][row] & _NODE_MASK).astype(np.int64),
                kind=np.full(len(row), _TYPES[name], np.int64),
                what=np.stack(columns, 1) if columns else np.zeros((len(row), len(_SHAPE) + 1), np.int32),
                own=own[table["name"][row]] if columns else np.zeros(len(row), np.bool_),
            )
            parts.setdefault(int(part.graph[0]), []).append(part)
    return {number: _joined(found) for number, found in parts.items()}


def _joined(parts: list[_Work]) -> _Work:
    """Returns all rows of the parts."""
    if len(parts) == 1:
        return parts[0]
    return _Work(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _Work.__slots__})


def _captured(context: Context) -> _Work:
    """Returns the nodes of the captured graphs that the agent recorded, graph by graph."""
    table = context.trace.table("graph_node")
    own = np.append(matches(context.trace.strings, _DRIVERS_OWN), False)
    return _Work(
        np.zeros(len(table), np.int8),
        np.arange(len(table)),
        table["graph"].astype(np.int64),
        table["node"].astype(np.int64),
        table["type"].astype(np.int64),
        np.stack([table[name] for name in ("name", *_SHAPE)], 1),
        own[table["name"]],
    )


def _kernels(graph: _Work) -> bytes:
    """Returns the features that two graphs must share. The nodes must be in their order, each one once."""
    chosen = (graph.kind == _TYPES["kernel"]) & ~graph.own
    return np.column_stack((graph.node[chosen], graph.what[chosen])).tobytes()


def _has_others(captured: _Work, work: _Work) -> bool:
    """Returns whether the copies and fills that ran are copies and fills of the captured graph."""
    others = work.take((work.kind != _TYPES["kernel"]) | work.own)
    if not (others.node < len(captured.node)).all():
        return False
    kind, own = captured.kind[others.node], captured.own[others.node]
    return bool(np.where(others.own, (kind == 1) | (kind == 2) | own, kind == others.kind).all())


def _first_of_each(node: Ints) -> Ints:
    """Returns for each node its first place, or NO_ROW."""
    first = np.full(int(node.max()) + 1, NO_ROW, np.int64)
    first[node[::-1]] = np.arange(len(node) - 1, -1, -1)
    return first


def _is_constant(work: _Work, first: Ints) -> bool:
    """Returns whether each node ran the same in all replays."""
    same = first[work.node]
    return bool((work.what == work.what[same]).all() and (work.kind == work.kind[same]).all())


def _alike(context: Context, graphs: Sequence[_Work]) -> dict[bytes, dict[bytes, _Alike]]:
    """Returns the graphs by their kernels, and then by their other nodes."""
    found: dict[bytes, dict[bytes, _Alike]] = {}
    for graph in graphs:
        nodes = np.column_stack((graph.kind, graph.own)).tobytes()
        alike = found.setdefault(_kernels(graph), {}).setdefault(nodes, _Alike(graph, set(), set()))
        paths, inputs = _attribution(context, graph)
        alike.paths.add(paths)
        alike.inputs.add(inputs)
    return found


def _several(sets: Iterable[set[bytes]]) -> bool:
    """Returns whether the sets together have several different elements."""
    return len({element for each in sets for element in islice(each, 2)}) > 1


def _attribution(context: Context, graph: _Work) -> tuple[bytes, bytes]:
    """Returns the operators of all nodes, without and with their inputs, for comparison."""
    paths, inputs = context.get(_op_numbers)
    operator = context.trace.table("graph_node")["operator"][graph.row]
    return paths[operator].tobytes(), inputs[operator].tobytes()


def _op_numbers(context: Context) -> tuple[Ints, Ints]:
    """Returns for each row of graph_op, and one more for none, a number shared by equal operators with equal parents.

    The second array distinguishes inputs, too.
    """
    table = context.trace.table("graph_op")
    known: dict[tuple[int, int, int], int] = {}
    paths, inputs = np.full(len(table) + 1, -1, np.int64), np.full(len(table) + 1, -1, np.int64)
    columns = (table[name].tolist() for name in ("parent", "name", "inputs"))
    for row, (parent, name, given) in enumerate(zip(*columns, strict=True)):
        paths[row] = known.setdefault((int(paths[parent]), name, -2), len(known))
        inputs[row] = known.setdefault((int(inputs[parent]), name, given), len(known))
    return paths, inputs


def op_paths(context: Context) -> list[tuple[int, ...]]:
    """Returns for each row of graph_op the names (string numbers) of the enclosing operators and its own, outermost
    first.

    A graph has few distinct operators, but many of them are nested alike.
    """
    table = context.trace.table("graph_op")
    paths: list[tuple[int, ...]] = []
    for parent, name in zip(table["parent"].tolist(), table["name"].tolist(), strict=True):
        paths.append((*(paths[parent] if parent != NO_ROW else ()), name))
    return paths
