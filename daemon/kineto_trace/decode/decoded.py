"""What every decoder of raw records takes and returns: `decode(source, strings, window) -> Decoded`.

A decoder is one module for each format of kineto_agent.protocol.records, and one row of DECODERS in open/raw_target.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kineto_trace.model.trace import StringTable, Table
from kineto_trace.spool.raw_records import RawSource


class DecodeWindow(NamedTuple):
    """The wanted part of the recording, in Unix ns; both 0: unknown, all of it."""

    start_ns: int = 0
    end_ns: int = 0


EVERYTHING = DecodeWindow()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What the records of one source held. Names are numbers into the strings that the decoder was given."""

    tables: Mapping[str, Table]
    records: int
    undecoded: int  # records that came but could not be read
    out_of_window: int = 0  # records that were left out
    warnings: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of the target: devices, versions
    threads: Mapping[int, str] = field(default_factory=dict)  # names that the source gave
    thread_use: Sequence[dict[str, int]] = ()  # as TargetInfo has it
    sample_period_ns: int = 0  # of python_function


Decode = Callable[[RawSource, StringTable, DecodeWindow], Decoded]
