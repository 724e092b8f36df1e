"""What the declaration of one table of a trace consists of."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from kineto_trace.model.event_kinds import Arg


class Column(NamedTuple):
    """One column of a table. text: its values are numbers into Trace.strings; -1: none."""

    name: str
    dtype: str
    meaning: str
    text: bool = False


class ViewerRow(Enum):
    """Where a viewer shows the activities of a table."""

    OPERATOR = auto()  # on their thread: they have ids, and contain what happens inside them
    ANNOTATION = auto()  # around the GPU work on the row of a stream
    GPU = auto()  # GPU work, on the row of its stream
    PYTHON = auto()  # on their thread
    OVERHEAD = auto()  # on a row of the profiler's own
    SYNC = auto()  # on a row beside that of the stream
    CALL = auto()  # on their thread: they cause GPU work
    MEMORY = auto()  # on their thread, without duration
    FILE = auto()  # where the file has them; only in traces that were read from a file
    NONE = auto()  # nowhere: they have no time


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityTable:
    """One table, named after its category in Kineto's traces.

    categories: lower-case categories of the complete events that are read into it; *_text: all categories with this
    ending. A category belongs to the first table that names it, in the order of ViewerRow.
    """

    name: str
    row: ViewerRow
    meaning: str
    columns: tuple[Column, ...]
    arguments: tuple[Arg, ...] = ()
    categories: tuple[str, ...] = ()
