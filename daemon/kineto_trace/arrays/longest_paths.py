"""Paths through large dependency graphs, found by the native library."""

import ctypes
from functools import cache
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.codec import declare, load, members
from kineto_trace.base.array_types import Ints
from kineto_trace.errors import ViewError

_CYCLE, _NO_MEMORY = 1, 2


class _Graph(ctypes.Structure):
    _fields_ = (*members(ctypes.c_uint64, "nodes", "edges"), *members(ctypes.c_void_p, "first", "last", "weight"))


@cache
def _library() -> ctypes.CDLL:
    library = load()
    pointer = ctypes.c_void_p
    declare(library, ctypes.c_uint64, "kc_trail", pointer, ctypes.c_uint64, ctypes.c_int64, pointer)
    declare(library, ctypes.c_int, "kc_longest", pointer, pointer, pointer)
    return library


def trail(before: Ints, node: int) -> Ints:
    """Returns the node, its predecessor, and so on until there is none (below 0)."""
    before = np.ascontiguousarray(before, np.int64)
    length = _library().kc_trail(before.ctypes.data, len(before), node, None)
    nodes = np.empty(length, np.int64)
    _library().kc_trail(before.ctypes.data, len(before), node, nodes.ctypes.data)
    return nodes


class Edges(NamedTuple):
    """Edges of a graph: first[n] → last[n] with a weight of 0 or more.

    Of paths with equal weight, the one with the earlier edge wins.
    """

    first: Ints
    last: Ints
    weight: Ints


def longest(nodes: int, edges: Edges) -> Ints:
    """Returns the edges of the heaviest path in order. Raises ViewError if the graph has a cycle."""
    first, last, weight = (np.ascontiguousarray(column, np.int64) for column in edges)
    for ends in (first, last):
        if len(ends) and not (int(ends.min()) >= 0 and int(ends.max()) < nodes):
            raise ValueError("an edge joins nodes that do not exist")
    via, end = np.empty(nodes, np.int64), ctypes.c_int64(-1)
    graph = _Graph(nodes, len(first), first.ctypes.data, last.ctypes.data, weight.ctypes.data)
    status = _library().kc_longest(ctypes.byref(graph), via.ctypes.data, ctypes.byref(end))
    if status == _NO_MEMORY:
        raise MemoryError("not enough memory to search a graph")
    if status == _CYCLE:
        raise ViewError("the events of this trace depend on each other in a cycle: HTA's rules find no critical path")
    before = np.where(via >= 0, first[via], -1) if len(first) else via
    path = trail(before, end.value)[::-1]
    return via[path[1:]]
