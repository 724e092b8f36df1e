"""The bits of the column `present` for an event of a Chrome trace, and the description of an argument with a column.

model/activity_tables.py lists these arguments.
"""

from typing import NamedTuple

FIRST_ARG_BIT = 20
MAX_ARGS = 42

# Bits of `present` that are not arguments: the event has the member, and the columns hold its exact value.
PHASE, CATEGORY, NAME, PID, TID, TS, DUR, ID, ARGS = (1 << n for n in range(9))
BP_E, S_T, S_G = 1 << 9, 1 << 10, 1 << 11  # "bp":"e", "s":"t", "s":"g"
TS_INTEGER, DUR_INTEGER = 1 << 12, 1 << 13  # without a decimal point
TS_REAL, DUR_REAL = 1 << 14, 1 << 15  # fractions of a nanosecond: origin columns ts_real, dur_real (double, us)
PID_TEXT, TID_TEXT, ID_TEXT = 1 << 16, 1 << 17, 1 << 18

# Types of arguments, as in chrome.h
I64, U64, I32, U32, U16, F64, BOOL, I32X3, SIGNED_U32 = range(9)
DTYPES = {
    I64: "int64",
    U64: "uint64",
    I32: "int32",
    U32: "uint32",
    U16: "uint16",
    F64: "float64",
    BOOL: "uint8",
    I32X3: "int32",
    SIGNED_U32: "uint32",
}


class Arg(NamedTuple):
    """One argument. column: its destination; for I32X3 the common prefix (grid -> grid_x, grid_y, grid_z)."""

    key: str
    column: str
    type: int
    default: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns all columns that the argument fills."""
        if self.type == I32X3:
            return tuple(f"{self.column}_{axis}" for axis in "xyz")
        return (self.column,)
