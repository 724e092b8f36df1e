"""The result of a decoder, the window it gets, and the reader of records of a fixed size.

A decoder is one module for each format of kineto_agent.protocol.records, and one row of DECODERS in open/raw_target.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.base.array_types import AnyArray, Ints, UInts32
from kineto_trace.model.hlo_module import HloModule
from kineto_trace.model.trace import StringTable, Table
from kineto_trace.spool.raw_records import RawSource


class DecodeWindow(NamedTuple):
    """The wanted part of the recording, in Unix ns; if both are 0, the window is unknown and everything is wanted."""

    start_ns: int = 0
    end_ns: int = 0


EVERYTHING = DecodeWindow()


class StepMarks(NamedTuple):
    """When training iterations began.

    number, start (Unix ns): ascending.
    thread: system thread id that stepped.
    """

    number: Ints
    start: Ints
    thread: Ints


class Submissions(NamedTuple):
    """Where GPU activities were submitted, from sources whose records contain it, so that no call need be recorded.

    correlation: of the activity.
    thread: system thread id.
    time: Unix ns.
    All of one length.
    """

    correlation: UInts32
    thread: UInts32
    time: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The decoded records of one source. Names are numbers into the strings passed to the decoder."""

    tables: Mapping[str, Table]
    records: int
    undecoded: int  # records that were received but could not be read
    out_of_window: int = 0  # records that were dropped
    warnings: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)  # about the target: devices, versions
    threads: Mapping[int, str] = field(default_factory=dict)  # names that the source provided
    thread_use: Sequence[dict[str, int]] = ()  # as in TargetInfo
    sample_period_ns: int = 0  # period of the python_function samples
    step_marks: StepMarks | None = None
    categories: Mapping[str, str] = field(default_factory=dict)  # as in Trace
    submissions: Submissions | None = None
    hlo_modules: tuple[HloModule, ...] = ()


Decode = Callable[[RawSource, StringTable, DecodeWindow], Decoded]


def record_dtype(fields: Mapping[str, str]) -> np.dtype[Any]:
    """Returns the dtype with the layout that the `struct` codes describe."""
    return np.dtype([(name, "<" + code) for name, code in fields.items()])


def fixed_records(source: RawSource, layout: np.dtype[Any]) -> tuple[AnyArray, int]:
    """Returns all complete records of the source, and the number of buffers that end within a record."""
    size = layout.itemsize
    parts = [
        np.frombuffer(source.data[chunk.offset : chunk.offset + chunk.size // size * size], layout)
        for chunk in source.chunks
    ]
    cut = sum(1 for chunk in source.chunks if chunk.size % size)
    return (np.concatenate(parts) if parts else np.empty(0, layout)), cut
