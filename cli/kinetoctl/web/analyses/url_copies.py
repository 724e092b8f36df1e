"""Traces at URLs: each is copied to this machine in the background, and removed at the end or when room is needed.

Theory of operation
    A URL is listed and fetched with the credentials that the user's environment has, as by `kinetoctl report`. One
    thread fetches them one after the other: at the start of the server as long as they fit, and the others when they
    are opened; what was opened longest ago then makes room. A URL that failed is fetched again when it is opened. The
    thread ends with the program, whatever it is waiting for. `close` does not wait for it either: it takes away the
    folder that is being written (temporary_folders.py), and there is no new one after that.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass, field

from kinetoctl.base.value_types import removable_folder
from kinetoctl.errors import CliError, Refused, TraceUnreadable, trace_errors
from kinetoctl.output import units
from kinetoctl.web.analyses.analysis_queue import Computing
from kinetoctl.web.analyses.trace_list import ListedTrace, id_of

DEFAULT_ROOM = 8 << 30  # bytes
_PREFIX = "kinetoctl-"


class _Later(Exception):
    """There is no room for what nobody has opened yet, or fetching has ended."""


@dataclass(slots=True)
class _Copy:
    """A URL. paths: of the traces, once it was asked for; opened: by a page; size_bytes: of what is here of it.

    stack: removes that; problem: why the last try failed.
    """

    url: str
    paths: "Future[tuple[str, ...]] | None" = None
    opened: bool = False
    size_bytes: int = 0
    stack: ExitStack = field(default_factory=ExitStack)
    problem: str = ""

    def remove(self) -> None:
        """Removes what is here of it."""
        self.stack.close()
        self.paths, self.opened, self.size_bytes = None, False, 0


class UrlCopies:
    """The copies of some URLs, of at most so many bytes together. Thread-safe; `close` removes them."""

    def __init__(self, urls: Sequence[str], most_bytes: int = DEFAULT_ROOM) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._copies = OrderedDict((id_of(url), _Copy(url)) for url in urls)
        self._order = tuple(self._copies)
        self._closed = False
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()  # "": nothing more will be asked for
        for each in self._order:
            self._ask(each)
        if urls:
            threading.Thread(target=self._fetch_all, name="urls", daemon=True).start()

    def close(self) -> None:
        """Removes what was fetched, and ends fetching."""
        with self._lock:
            self._closed = True
            self._asked.put("")
            for copy in self._copies.values():
                copy.stack.close()

    def traces(self) -> list[ListedTrace]:
        """The URLs, each with what has become of it."""
        with self._lock:
            return [_listed(each, self._copies[each]) for each in self._order]

    def paths(self, trace_id: str, wait_s: float) -> tuple[str, ...] | None:
        """Where the traces of this id are here; None if no URL has it. Raises Computing while they come, CliError."""
        with self._lock:
            copy = self._copies.get(trace_id)
            if copy is None:
                return None
            self._copies.move_to_end(trace_id)
            copy.opened = True
            coming = copy.paths or self._ask(trace_id)
        try:
            return coming.result(wait_s)
        except FutureTimeout:
            raise Computing from None
        except CliError:
            with self._lock:
                if copy.paths is coming:
                    copy.paths = None
            raise

    def _ask(self, trace_id: str) -> "Future[tuple[str, ...]]":
        coming = self._copies[trace_id].paths = Future()
        self._asked.put(trace_id)
        return coming

    def _fetch_all(self) -> None:
        while (each := self._asked.get()) and not self._closed:
            copy = self._copies[each]
            coming = copy.paths
            if coming is None:
                continue
            try:
                found = self._fetched(copy)
            except CliError as exc:
                self._failed(copy, str(exc))
                coming.set_exception(exc)
            except _Later:
                with self._lock:
                    copy.paths = None
                coming.set_exception(Computing())  # whoever opened it meanwhile asks again
            except Exception as exc:  # noqa: BLE001 - of a store's library; the next URL may do better
                self._failed(copy, f"{copy.url}: {type(exc).__name__}: {exc}")
                coming.set_exception(TraceUnreadable(copy.problem))
            else:
                coming.set_result(found)

    def _fetched(self, copy: _Copy) -> tuple[str, ...]:
        """Fetches a URL. Raises CliError, and _Later if it must wait until somebody opens it."""
        from kineto_trace.open.remote_traces import fetch, fetched_bytes
        from kineto_trace.open.trace_discovery import find_traces

        with trace_errors():
            sources = [source for source in find_traces(copy.url) if source.remote is not None]
            size = sum(fetched_bytes(source.remote) for source in sources if source.remote is not None)
        with self._lock:
            if self._closed:
                raise _Later
            self._make_room(copy, size)
            folder = copy.stack.enter_context(removable_folder(_PREFIX))
            copy.size_bytes, copy.problem = size, ""
        paths = []
        with trace_errors():
            for number, source in enumerate(sources):
                if source.remote is not None:
                    # The name of the inner folder keeps a rank that only the URL told.
                    own = folder / str(number) / f"rank{source.rank}"
                    own.parent.mkdir()
                    own.mkdir()
                    paths.append(str(fetch(source.remote, own)))
        return tuple(paths)

    def _make_room(self, wanted: _Copy, size: int) -> None:
        """Removes what was opened longest ago until there is room. Raises Refused, _Later."""
        if size > self._most_bytes:
            raise Refused(
                f"{wanted.url} has {units.size(size)}, more than this server keeps of URLs "
                f"({units.size(self._most_bytes)}): start it with a larger --url-space"
            )
        others = [copy for copy in self._copies.values() if copy is not wanted and copy.size_bytes]
        if not wanted.opened and size + sum(copy.size_bytes for copy in others) > self._most_bytes:
            raise _Later
        for copy in others:
            if size + sum(other.size_bytes for other in others) <= self._most_bytes:
                return
            copy.remove()

    def _failed(self, copy: _Copy, problem: str) -> None:
        with self._lock:
            copy.stack.close()
            copy.size_bytes, copy.problem = 0, problem


def _listed(trace_id: str, copy: _Copy) -> ListedTrace:
    coming = copy.paths is not None and not copy.paths.done()
    state = "being fetched" if coming else "" if copy.size_bytes else "fetched when it is opened"
    return ListedTrace(
        id=trace_id,
        name=copy.url,
        words=(copy.url,),
        size_bytes=copy.size_bytes,
        state="failed" if copy.problem and not coming else state,
        problem="" if coming else copy.problem,
    )
