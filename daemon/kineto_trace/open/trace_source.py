"""Where traces are, before anybody has opened them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kineto_trace.base.quantities import shortened
from kineto_trace.base.visible_text import one_line

MAX_PLACE = 120
RankFrom = Literal["given", "trace", "name", "order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file in an object store.

    name: relative to the URL of the trace; "" is the URL itself. sha256: "" if it is unknown.
    """

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTrace:
    """A trace in an object store: a file, a folder of columns, or a target of an uploaded capture.

    rank: None if it is unknown. process, capture: see TraceOrigin. problem: why it cannot be read; "" if it can.
    """

    url: str
    files: tuple[RemoteFile, ...] = ()
    rank: int | None = None
    process: str = ""
    capture: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trace that has not been opened yet.

    path: on this machine; for a trace in an object store, its location without the scheme, used only for names.
    rank_from: where the rank comes from. worker, span: for a TensorBoard log folder, the process and the position of
    the trace among its traces in order of time, counted from 1; otherwise "" and 0. process, capture: see TraceOrigin;
    of a TensorBoard log folder, the span. left_out: other captures of the same process, which are not used.
    """

    path: Path
    rank: int
    rank_from: RankFrom = "given"
    worker: str = ""
    span: int = 0
    process: str = ""
    capture: str = ""
    left_out: tuple[str, ...] = ()
    remote: RemoteTrace | None = None

    def __repr__(self) -> str:
        left = f", {len(self.left_out)} other captures of it left out" if self.left_out else ""
        return f"<Source of rank {self.rank}: {one_line(shortened(self.place, MAX_PLACE))}{left}>"

    @property
    def place(self) -> str:
        """Its path or URL, for messages."""
        return str(self.path) if self.remote is None else self.remote.url
