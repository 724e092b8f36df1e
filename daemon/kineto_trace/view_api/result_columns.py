"""The columns of results. Whatever only shows them imports this, and not Arrow."""

from typing import Literal, NamedTuple

Type = Literal["text", "int", "float", "bool", "ints", "texts"]


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
