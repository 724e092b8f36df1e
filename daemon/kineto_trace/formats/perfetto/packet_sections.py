"""What a Perfetto trace shows of a trace: the rows of each table with their times, tracks and annotations.

Annotations have the names of Kineto's JSON arguments; what a row does not have (no graph, no op) is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Texts
from kineto_trace.formats.perfetto.perfetto_proto import Annotations, Ready
from kineto_trace.formats.shared.native_packets import DOUBLE, OPTIONAL, READY, SIGNED, UNSIGNED, PacketField

AnyArray = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint32]
NOT_READY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketPart:
    """Rows that look alike. Times in Unix ns; one value per row in every array.

    type: of perfetto_native. category: its text, or the number of a text per row. leaf: nothing may stand inside them.
    value: of counters. readies: by place among the fields that are READY, the entries of its table.
    """

    type: int
    category: str | npt.NDArray[np.int32]
    start: Ints
    end: Ints
    track: Numbers
    name: npt.NDArray[np.int32] | None
    fields: Sequence[PacketField] = ()
    readies: Sequence[Sequence[Ready]] = ()
    leaf: bool = False
    value: AnyArray | None = None
    kind: str = ""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class FieldList:
    """Collects the annotations of one part."""

    annotations: Annotations
    fields: list[PacketField] = field(default_factory=list)
    readies: list[Sequence[Ready]] = field(default_factory=list)

    def unsigned(self, name: str, column: AnyArray) -> None:
        """A number that every row has."""
        self.fields.append(PacketField(self.annotations.name(name), UNSIGNED, column))

    def signed(self, name: str, column: AnyArray) -> None:
        """Likewise, maybe negative."""
        self.fields.append(PacketField(self.annotations.name(name), SIGNED, column))

    def number(self, name: str, column: AnyArray) -> None:
        """Likewise, of whichever type its column has."""
        (self.signed if column.dtype.kind == "i" else self.unsigned)(name, column)

    def double(self, name: str, column: AnyArray) -> None:
        """Likewise, any number."""
        self.fields.append(PacketField(self.annotations.name(name), DOUBLE, column.astype(np.float64, copy=False)))

    def optional(self, name: str, column: AnyArray, missing: int = 0) -> None:
        """A number that rows with the value `missing` do not have."""
        if (column == missing).all():
            return
        if column.dtype.kind == "u":  # to a signed type that holds the values
            column = column.astype(f"i{min(8, 2 * column.itemsize)}")
        self.fields.append(PacketField(self.annotations.name(name), OPTIONAL, column, missing))

    def ready(self, column: AnyArray, entries: Sequence[Ready]) -> None:
        """Whole annotations: numbers into `entries`, NOT_READY (or any other number that is none): nothing."""
        table = Texts([entry.content for entry in entries])
        self.fields.append(PacketField(0, READY, column, ready=table))
        self.readies.append(entries)

    def texts(self, name: str, column: npt.NDArray[np.int32], strings: Sequence[str]) -> None:
        """Numbers of strings that are values of one annotation; NO_STRING: none."""
        self._numbered(column, strings, lambda text: self.annotations.ready({name: text}))

    def members(self, column: npt.NDArray[np.int32], strings: Sequence[str]) -> None:
        """Numbers of strings that are JSON members; NO_STRING: none."""
        self._numbered(column, strings, self.annotations.ready_text)

    def _numbered(self, column: npt.NDArray[np.int32], strings: Sequence[str], entry: Callable[[str], Ready]) -> None:
        used = used_numbers(column, len(strings))
        if not len(used):
            return
        numbers = np.full(len(strings) + 1, NOT_READY, np.uint32)
        numbers[used] = np.arange(len(used))
        self.ready(numbers[column], [entry(strings[number]) for number in used.tolist()])


def used_numbers(column: AnyArray, limit: int) -> Ints:
    """The different numbers (0 … limit - 1; others do not count) in a column, ascending."""
    if len(column) < limit // 8:
        found = np.unique(column).astype(np.int64)
        return found[(found >= 0) & (found < limit)]
    seen = np.zeros(limit + 1, np.bool_)
    seen[column] = True  # -1 is the last one
    return np.flatnonzero(seen[:limit])
