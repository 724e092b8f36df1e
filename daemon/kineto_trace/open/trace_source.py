"""Where traces are, before anybody has opened them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RankFrom = Literal["given", "trace", "name", "order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file in an object store. name: below the trace's URL; "": the URL itself. sha256: "": nobody knows it."""

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTrace:
    """A trace in an object store: a file, a folder of columns, or a target of an uploaded capture.

    rank: as far as it is known. problem: why there is nothing to be read; "": there is.
    """

    url: str
    files: tuple[RemoteFile, ...] = ()
    rank: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One trace, not yet opened.

    path: on this machine; of one in an object store, its place there without the scheme, for names alone.
    rank_from: who says the rank. worker, span: of a TensorBoard log folder: the process, and which of its traces in
    the order of time it is, from 1; "" and 0 elsewhere.
    """

    path: Path
    rank: int
    rank_from: RankFrom = "given"
    worker: str = ""
    span: int = 0
    remote: RemoteTrace | None = None

    @property
    def place(self) -> str:
        """Its path or URL, for messages."""
        return str(self.path) if self.remote is None else self.remote.url
