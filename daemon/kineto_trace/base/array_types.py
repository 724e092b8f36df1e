"""Arrays by the type of their items, and NOTHING for a missing row."""

from typing import Any

import numpy as np
import numpy.typing as npt

NOTHING = -1  # in an array of rows: none

Ints8 = npt.NDArray[np.int8]
Ints32 = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
UInts8 = npt.NDArray[np.uint8]
UInts16 = npt.NDArray[np.uint16]
UInts32 = npt.NDArray[np.uint32]
UInts64 = npt.NDArray[np.uint64]
Floats32 = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Objects = npt.NDArray[np.object_]
Structs = npt.NDArray[np.void]
AnyInts = npt.NDArray[np.signedinteger[Any]]
AnyArray = npt.NDArray[Any]
