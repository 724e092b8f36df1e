"""What the column `present` says of an event of a Chrome trace, and what an argument is that has a column.

model/activity_tables.py says which arguments that are.
"""

from typing import NamedTuple

FIRST_ARG_BIT = 20
MAX_ARGS = 42

# Bits of `present` that are not arguments: the event has the member, and the columns say it exactly.
PHASE, CATEGORY, NAME, PID, TID, TS, DUR, ID, ARGS = (1 << n for n in range(9))
BP_E, S_T, S_G = 1 << 9, 1 << 10, 1 << 11  # "bp":"e", "s":"t", "s":"g"
TS_INTEGER, DUR_INTEGER = 1 << 12, 1 << 13  # without a decimal point
TS_REAL, DUR_REAL = 1 << 14, 1 << 15  # not whole nanoseconds: origin columns ts_real, dur_real (double, us)
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
    """One argument. column: where it goes; of I32X3, its first letters (grid -> grid_x, grid_y, grid_z)."""

    key: str
    column: str
    type: int
    default: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that it fills."""
        if self.type == I32X3:
            return tuple(f"{self.column}_{axis}" for axis in "xyz")
        return (self.column,)
