"""Reads records of a fixed size as arrays, with the fields defined in kineto_agent.protocol.records."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.spool.raw_records import RawSource


def record_dtype(fields: Mapping[str, str]) -> np.dtype[Any]:
    """Returns the dtype with the layout that the `struct` codes describe."""
    return np.dtype([(name, "<" + code) for name, code in fields.items()])


def fixed_records(source: RawSource, layout: np.dtype[Any]) -> tuple[npt.NDArray[Any], int]:
    """Returns all complete records of the source, and the number of buffers that end within a record."""
    size = layout.itemsize
    parts = [
        np.frombuffer(source.data[chunk.offset : chunk.offset + chunk.size // size * size], layout)
        for chunk in source.chunks
    ]
    cut = sum(1 for chunk in source.chunks if chunk.size % size)
    return (np.concatenate(parts) if parts else np.empty(0, layout)), cut
