"""Folds fields whose value is the same in all rows into the literals: rows have fewer fields, the text is the same.

Most traces have many such fields: process, device, context, category, and everything that is 0 throughout.
"""

from collections.abc import Sequence

import numpy as np

from kineto_trace.arrays.codec import SIGNED, TEXT, UNSIGNED, AnyArray, Field

_SAMPLE = 64  # values compared first: few varying columns pass this check


def folded(fields: Sequence[Field], rows: AnyArray | None = None) -> list[Field]:
    """Returns a form with its constant fields folded, for these rows of the columns (None: all).

    The last field ends the row.
    """
    found: list[Field] = []
    pending = b""
    for field in fields:
        text = _constant(field, rows)
        if text is None:
            found.append(field._replace(literal=pending + field.literal))
            pending = b""
        else:
            pending += field.literal + text
    if pending:
        found.append(Field(pending))
    return found


def _constant(field: Field, rows: AnyArray | None) -> bytes | None:
    """Returns the text of a field that is the same in all rows; None if it varies or its type cannot be folded."""
    column = field.column
    if column is None or field.operation not in (TEXT, SIGNED, UNSIGNED) or not len(column):
        return None
    if rows is None:
        if (column[:_SAMPLE] != column[0]).any() or (column != column[0]).any():
            return None
        value = column[:1]
    else:
        if not len(rows) or (column[rows[:_SAMPLE]] != column[rows[0]]).any():
            return None
        value = column[rows[:1]]
        if (column[rows] != value[0]).any():
            return None
    kind = "i" if field.operation == SIGNED else "u"  # as the native code reads it
    number = int(np.ascontiguousarray(value).view(f"{kind}{value.itemsize}")[0])
    if field.operation != TEXT:
        return b"%d" % number
    if field.texts is None or number >= field.texts.count:
        return b""
    return field.texts.data[int(field.texts.ends[number]) : int(field.texts.ends[number + 1])].tobytes()
