"""The columns of results, and their units. Code that only shows them imports this, and not Arrow."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Type = Literal["text", "int", "float", "bool", "ints", "texts"]
SCALES: Mapping[str, Sequence[tuple[float, str]]] = {  # the largest first
    "us": ((1e6, "s"), (1e3, "ms"), (1, "µs")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "B/s": ((2**30, "GiB/s"), (2**20, "MiB/s"), (2**10, "KiB/s"), (1, "B/s")),
    "Hz": ((1e9, "GHz"), (1e6, "MHz"), (1e3, "kHz"), (1, "Hz")),
}


class ResultColumn(NamedTuple):
    """One column of a result. unit: "us" (microseconds), "ns" (Unix time), "%", "bytes", "GB/s", …; "" for none.

    Any value may be missing (None in Python, NULL in SQL): it was not recorded or does not apply.
    """

    name: str
    type: Type
    unit: str
    meaning: str


def columns(*rows: tuple[str, Type, str, str]) -> tuple[ResultColumn, ...]:
    """Makes columns from tuples (name, type, unit, meaning)."""
    return tuple(ResultColumn(*row) for row in rows)


def scaled_unit(unit: str, largest: float) -> tuple[float, str]:
    """Returns the factor for values in this unit and the resulting unit: the one that fits the largest value."""
    for size, name in SCALES.get(unit, ()):
        if largest >= size or size == 1:
            return 1 / size, name
    return 1.0, unit
