"""Strings of a trace as columns of results, without an object per row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def texts(strings: Sequence[str], numbers: npt.NDArray[Any]) -> pa.Array:
    """Returns the string of each number; missing for negative numbers."""
    used = np.zeros(len(strings), np.bool_)
    used[numbers[numbers >= 0]] = True
    rows = np.flatnonzero(used)
    place = np.empty(len(strings), np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    wanted = [strings[row] for row in rows.tolist()]
    try:
        dictionary = pa.array(wanted, pa.string())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        wanted = [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for text in wanted]
        dictionary = pa.array(wanted, pa.string())
    missing = numbers < 0
    index = np.where(missing, 0, place[numbers] if len(strings) else 0).astype(np.int32)
    return dictionary.take(pa.array(index, mask=missing))
