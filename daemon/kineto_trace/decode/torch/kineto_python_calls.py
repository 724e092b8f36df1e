"""Decodes exact Python calls as Kineto writes them into the table python_function.

A row names its caller by an id that is valid within one document. If only calls of modules are wanted (the program's
functions are then sampled), a call's caller is the nearest enclosing module.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kineto_trace.decode.torch.kineto_text import Row, thread_ids
from kineto_trace.model.trace import NO_MODULE, NO_ROW, Table, make_table

MAX_DEPTH = 4096  # calls; deeper chains are rejected

Ints = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]
_NO_ID = -1


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
        args = _decoded([bytes(row.args) for row in rows])
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


def parent_rows(ids: Ints, parents: Ints) -> Ints:
    """Returns the rows of the callers; NO_ROW for callers without a row."""
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids, parents, sorter=order), len(ids) - 1)
    found = order[at]
    known = (ids[found] == parents) & (parents != _NO_ID) & (found != np.arange(len(ids)))
    return np.where(known, found, NO_ROW)


def _only(columns: Mapping[str, AnyArray], kept: npt.NDArray[np.bool_]) -> dict[str, AnyArray]:
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


def depths(parent: Ints) -> npt.NDArray[np.int32]:
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


def _decoded(texts: list[bytes]) -> list[_CallArgs]:
    try:
        return _args.decode(b"[" + b",".join(texts) + b"]")
    except msgspec.DecodeError:
        return [_decoded_one(text) for text in texts]


def _decoded_one(text: bytes) -> _CallArgs:
    try:
        return _one.decode(text)
    except msgspec.DecodeError:
        return _CallArgs()
