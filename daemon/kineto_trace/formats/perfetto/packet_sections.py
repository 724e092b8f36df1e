"""What a Perfetto trace shows of a trace: the rows of each table with their times, tracks and annotations.

Annotations have the names of Kineto's JSON arguments; arguments that a row lacks (no graph, no op) are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import PreparedTexts
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.formats.perfetto.perfetto_proto import Annotations, Ready
from kineto_trace.formats.shared.native_packets import DOUBLE, OPTIONAL, READY, SIGNED, UNSIGNED, PacketField

AnyArray = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint32]
NOT_READY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketPart:
    """Rows of the same form. Times are in Unix ns; every array has one value per row.

    type: as in perfetto_native. category: one text for all rows, or the number of a text for each row, in
    `categories` or, without these, in Trace.strings. leaf: nothing
    may be nested inside the rows. value: the values of counters. readies: the entries of each READY field, in the order
    of those fields.
    """

    type: int
    category: str | npt.NDArray[np.int32]
    categories: Sequence[str] = ()
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
        """Adds an unsigned number that every row has."""
        self.fields.append(PacketField(self.annotations.name(name), UNSIGNED, column))

    def signed(self, name: str, column: AnyArray) -> None:
        """Adds a signed number that every row has."""
        self.fields.append(PacketField(self.annotations.name(name), SIGNED, column))

    def number(self, name: str, column: AnyArray) -> None:
        """Adds an integer that every row has, signed or unsigned as its column."""
        (self.signed if column.dtype.kind == "i" else self.unsigned)(name, column)

    def double(self, name: str, column: AnyArray) -> None:
        """Adds a floating-point number that every row has."""
        self.fields.append(PacketField(self.annotations.name(name), DOUBLE, column.astype(np.float64, copy=False)))

    def optional(self, name: str, column: AnyArray, missing: int = 0) -> None:
        """Adds a number that rows with the value `missing` do not have."""
        if (column == missing).all():
            return
        if column.dtype.kind == "u":  # use a signed type that holds the values
            column = column.astype(f"i{min(8, 2 * column.itemsize)}")
        self.fields.append(PacketField(self.annotations.name(name), OPTIONAL, column, missing))

    def ready(self, column: AnyArray, entries: Sequence[Ready]) -> None:
        """Adds whole annotations by their numbers in `entries`; NOT_READY or any other invalid number adds nothing."""
        table = PreparedTexts([entry.content for entry in entries])
        self.fields.append(PacketField(0, READY, column, ready=table))
        self.readies.append(entries)

    def texts(self, name: str, column: npt.NDArray[np.int32], strings: Sequence[str]) -> None:
        """Adds an annotation whose values are strings, by their numbers; NO_STRING adds nothing."""
        self._numbered(column, strings, lambda text: self.annotations.ready({name: text}))

    def members(self, column: npt.NDArray[np.int32], strings: Sequence[str]) -> None:
        """Adds annotations that are strings of JSON members, by their numbers; NO_STRING adds nothing."""
        self._numbered(column, strings, self.annotations.ready_text)

    def _numbered(self, column: npt.NDArray[np.int32], strings: Sequence[str], entry: Callable[[str], Ready]) -> None:
        used = used_numbers(column, len(strings))
        if not len(used):
            return
        numbers = np.full(len(strings) + 1, NOT_READY, np.uint32)
        numbers[used] = np.arange(len(used))
        self.ready(numbers[column], [entry(strings[number]) for number in used.tolist()])


def used_numbers(column: AnyArray, limit: int) -> Ints:
    """Returns the distinct numbers in a column, ascending; numbers outside 0 … limit - 1 are ignored."""
    if len(column) < limit // 8:
        found = unique_values(column).astype(np.int64)
        return found[(found >= 0) & (found < limit)]
    seen = np.zeros(limit + 1, np.bool_)
    seen[column] = True  # -1 sets the last one
    return np.flatnonzero(seen[:limit])
