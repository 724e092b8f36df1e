"""The traces that the pages can show: those of captures, through the daemon, or what the command line names.

The command line names files, folders, patterns (trace_list.py) and URLs (UrlCopies). Of captures, the daemon is
asked first, with the caller's rights, as by `kinetoctl report ID`; what is downloaded stays until the server ends.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.value_types import removable_folder
from kinetoctl.errors import CliError, NotFound, Refused, TraceUnreadable, trace_errors
from kinetoctl.options.trace_arguments import CAPTURE_ID, snapshot_paths, trace_paths
from kinetoctl.output import units
from kinetoctl.web.analyses.analysis_queue import Computing
from kinetoctl.web.analyses.trace_list import ListedTrace, TraceList, id_of, identity

# Traces at URLs: each is copied to this machine in the background, and removed at the end or when room is needed.
#
# A URL is listed and fetched with the credentials that the user's environment has, as by `kinetoctl report`. One thread
# fetches them one after the other: at the start of the server as long as they fit, and the others when they are opened;
# what was opened longest ago then makes room. A URL that failed is fetched again when it is opened. The thread ends
# with the program, whatever it is waiting for. `close` does not wait for it either: it takes away the folder that is
# being written (temporary_folders.py), and there is no new one after that.
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
                coming.set_exception(Computing())  # whoever has opened it by then asks again
            except Exception as exc:  # noqa: BLE001 - of a store's library; the next URL may do better
                self._failed(copy, f"{copy.url}: {type(exc).__name__}: {exc}")
                coming.set_exception(TraceUnreadable(copy.problem))
            else:
                coming.set_result(found)

    def _fetched(self, copy: _Copy) -> tuple[str, ...]:
        """Fetches a URL. Raises CliError, and _Later if it must wait until somebody opens it."""
        from kineto_trace.open.remote_traces import fetch, needed_bytes
        from kineto_trace.open.trace_discovery import find_traces

        with trace_errors():
            sources = [source for source in find_traces(copy.url) if source.remote is not None]
            size = sum(needed_bytes(source.remote)[0] for source in sources if source.remote is not None)
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
                f"{wanted.url} needs {units.size(size)}, but this server keeps at most "
                f"{units.size(self._most_bytes)} for URLs: start it with a larger --url-space"
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


FIND_S = 0.7  # for the daemon's answer and the download, before a page is shown without them and loads itself again
MAX_FINDING = 4  # downloads at a time
MAX_CAPTURES_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSet:
    """What one page is about. argument: as `kinetoctl report` takes it. identity: changes with the files."""

    id: str
    argument: str
    paths: tuple[str, ...]
    identity: str


class _Found(NamedTuple):
    """The paths of a capture, once they are known, and what removes its files, which is done with the lock."""

    paths: "Future[tuple[str, ...]]"
    stack: ExitStack


FoundKey = tuple[str, str]  # a capture's id, and how what is kept of it was found
_Find = Callable[[str, ExitStack], tuple[str, ...]]


class TraceLibrary:
    """Finds traces by the id in a page's address. Thread-safe; `close` removes what was downloaded."""

    def __init__(self, settings: CommonOptions, arguments: Sequence[str] = (), url_space: int = DEFAULT_ROOM) -> None:
        """url_space: bytes that the copies of URLs may take."""
        self._settings = replace(settings, quiet=True)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_FINDING, thread_name_prefix="captures")
        self._captures: OrderedDict[FoundKey, _Found] = OrderedDict()  # empty once it is closed
        self.arguments = tuple(arguments)
        self.of_files = bool(arguments)
        self._list = TraceList([argument for argument in arguments if not _is_url(argument)])
        self._urls = UrlCopies([argument for argument in arguments if _is_url(argument)], url_space)

    @property
    def files(self) -> Mapping[str, str]:
        """The name of each trace that can be shown, by its id."""
        return {each.id: each.name for each in self.listed() if each.state != "gone"}

    def listed(self) -> list[ListedTrace]:
        """What the command line names, as far as it was found."""
        return [*self._list.traces(), *self._urls.traces()] if self.of_files else []

    def notes(self) -> list[str]:
        """What is to be said of that list."""
        return self._list.notes()

    @property
    def looked(self) -> bool:
        """Whether the list is complete."""
        return self._list.looked

    def name(self, trace_id: str) -> str:
        """What people call a trace: its file, folder or URL, or the id of the capture."""
        run = self._list.find(trace_id) if self.of_files else None
        return self.files.get(trace_id, trace_id) if run is None else run.name

    def words(self, name: str) -> tuple[str, ...]:
        """What names the trace of this name on a command line."""
        return next((each.words for each in self.listed() if each.name == name), (name,)) if self.of_files else (name,)

    def find(self, trace_id: str, wait_s: float = FIND_S) -> TraceSet:
        """The traces of a file's or a capture's id. A capture that takes longer to download is waited for again.

        Raises NotFound, Computing and the client's errors.
        """
        if self.of_files:
            return self._file(trace_id, wait_s)
        return self._of_capture(trace_id, self._paths, wait_s)

    def snapshots(self, trace_id: str, wait_s: float = FIND_S) -> TraceSet:
        """The memory snapshots of a file's or a capture's id, or beside a trace. Raises as `find` does."""
        if not self.of_files:
            return self._of_capture(trace_id, self._snapshot_paths, wait_s)
        from kineto_trace.snapshots.snapshot_reader import snapshots_at

        traces = self._file(trace_id, wait_s)
        paths = tuple(dict.fromkeys(str(each) for path in traces.paths for each in snapshots_at(path)))
        return replace(traces, paths=paths, identity=identity(paths))

    def _of_capture(self, trace_id: str, find: _Find, wait_s: float) -> TraceSet:
        """What `find` finds of a capture, now or before. Raises as `TraceLibrary.find` does."""
        if not CAPTURE_ID.fullmatch(trace_id):
            raise NotFound(f"there is no capture {trace_id}")
        key = trace_id, find.__name__
        found = self._capture(key, find)
        try:
            paths = found.paths.result(wait_s)
        except FutureTimeout:
            raise Computing from None
        except CliError:
            with self._lock:
                self._captures.pop(key, None)
            raise
        return TraceSet(id=trace_id, argument=trace_id, paths=paths, identity=identity(paths))

    def close(self) -> None:
        """Removes what was downloaded."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._list.close()
        self._urls.close()
        with self._lock:
            for found in self._captures.values():
                found.stack.close()
            self._captures.clear()

    def _capture(self, key: FoundKey, find: _Find) -> "_Found":
        """What is being found, or was, of a capture. Of too many, the first ones are removed."""
        with self._lock:
            found = self._captures.get(key)
            if found is None:
                while len(self._captures) >= MAX_CAPTURES_KEPT:
                    self._captures.popitem(last=False)[1].stack.close()
                stack = ExitStack()
                found = _Found(self._pool.submit(self._kept, key, find, stack), stack)
                self._captures[key] = found
            return found

    def _kept(self, key: FoundKey, find: _Find, stack: ExitStack) -> tuple[str, ...]:
        """What `find` finds. Nobody else removes what it leaves if it fails, or is forgotten before it has begun."""
        paths: tuple[str, ...] = ()
        try:
            return (paths := find(key[0], stack))
        finally:
            with self._lock:
                found = self._captures.get(key)
                if not paths or found is None or found.stack is not stack:
                    stack.close()

    def _paths(self, capture_id: str, stack: ExitStack) -> tuple[str, ...]:
        return tuple(map(str, trace_paths([capture_id], self._settings, stack)))

    def _snapshot_paths(self, capture_id: str, stack: ExitStack) -> tuple[str, ...]:
        return tuple(map(str, snapshot_paths([capture_id], self._settings, stack)))

    def _file(self, trace_id: str, wait_s: float) -> TraceSet:
        paths = self._urls.paths(trace_id, wait_s)
        if paths is not None:
            return TraceSet(id=trace_id, argument=trace_id, paths=paths, identity=identity(paths))
        run = self._list.find(trace_id)
        if run is None:
            if not self._list.looked:
                raise Computing
            raise NotFound(f"there is no trace {trace_id} among the files of this server")
        if not any(Path(file).exists() for file in run.files):
            raise NotFound(f"{run.name} is gone: it was moved or removed after it was found")
        return TraceSet(id=trace_id, argument=run.name, paths=run.paths, identity=identity(run.files))


def _is_url(argument: str) -> bool:
    from kineto_trace.store.object_stores import is_url

    return is_url(argument)
