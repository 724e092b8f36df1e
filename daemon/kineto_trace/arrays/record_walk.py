"""Finds the records in buffers of any framing, and gathers fields from them. See daemon/native/codec/walk_records.c."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import BufferResult, NativeResult, load

BY_KIND, BY_HEAD, BY_SIZE = range(3)  # framings: KC_BY_…
LEAST_RECORD_BYTES = 8  # of a record whose size follows from its kind
Bytes = npt.NDArray[np.uint8]


class _Size(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint32), ("record_bytes", ctypes.c_uint32))


class _Places(ctypes.Structure):
    _fields_ = (
        ("capacity", ctypes.c_uint64),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
        ("kind", ctypes.c_void_p),
    )


class Places(NamedTuple):
    """The records in the order of the buffers. begin: byte offset in the data; bytes: length; kind: of each record."""

    begin: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.uint32]
    kind: npt.NDArray[np.uint32]


def find_records(
    data: Bytes, buffers: Sequence[tuple[int, int]], framing: int, sizes: Mapping[int, int]
) -> tuple[Places, list[BufferResult]]:
    """Finds all records, and returns how the walk through each buffer ended.

    buffers: byte offset and size in `data` of each; sizes: bytes of a record by kind, for BY_KIND.
    """
    for offset, size in buffers:
        if not 0 <= offset <= offset + size <= len(data):
            raise IndexError(f"bytes {offset} to {offset + size} are outside the data")
    native = (_Size * max(1, len(sizes)))(*(_Size(kind, sizes[kind]) for kind in sorted(sizes)))
    counted = [_walk(data[at : at + size], framing, native, len(sizes), None) for at, size in buffers]
    total = sum(each.records for each in counted)
    found = Places(np.empty(total, np.int64), np.empty(total, np.uint32), np.empty(total, np.uint32))
    first = 0
    for (at, size), each in zip(buffers, counted, strict=True):
        rows = slice(first, first + each.records)
        part = Places(found.begin[rows], found.bytes[rows], found.kind[rows])
        room = _Places(each.records, *(array.ctypes.data for array in part))
        _walk(data[at : at + size], framing, native, len(sizes), room)
        np.add(part.begin, at, out=part.begin)
        first += each.records
    return found, counted


def _walk(data: Bytes, framing: int, sizes: Any, count: int, places: _Places | None) -> BufferResult:
    result = NativeResult()
    room = None if places is None else ctypes.byref(places)
    load().kc_walk(data.ctypes.data, data.nbytes, framing, sizes, count, room, ctypes.byref(result))
    return BufferResult(result.consumed, result.records, result.status, result.kind)


def gather(data: Bytes, begin: npt.NDArray[np.int64], offset: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns the value of one field of each record: `dtype` at byte `offset` of the records that begin there."""
    if not len(begin):
        return np.empty(0, dtype)
    if int(begin.min()) + offset < 0 or int(begin.max()) + offset + dtype.itemsize > len(data):
        raise IndexError(f"a field of {dtype.itemsize} bytes at byte {offset} is outside the data")
    # Every byte is the beginning of a value: the values overlap, and are not aligned.
    values = np.ndarray((len(data) - dtype.itemsize + 1 - offset,), dtype, data, offset, (1,))
    return values[begin]
