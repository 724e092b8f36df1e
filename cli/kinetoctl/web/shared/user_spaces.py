"""What the server keeps for each of its users, and what each of them may take.

Theory of operation
    A user has clients of the daemons that call for that user, a folder with downloaded traces, a secret for forms, and
    limits: MAX_RUNNING pages are made at a time, MAX_WAITING more may wait, and REQUESTS_PER_SECOND come on average.
    There are MAX_USERS such spaces; who was not seen for IDLE_S, or longest if there are too many, loses it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.value_types import removable_folder
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.fleet_files import HOSTS_AT_ONCE
from kinetoctl.errors import CliError, Refused
from kinetoctl.options.trace_arguments import SNAPSHOT_FORMAT, fetch_snapshots, fetch_trace, has_snapshot, wanted_format
from kinetoctl.output import units
from kinetoctl.web.analyses.analysis_queue import AnalysisFailed, AnalysisQueue
from kinetoctl.web.analyses.trace_library import FIND_S, FoundKey, TraceLibrary, TraceSet
from kinetoctl.web.http.web_messages import WebError, new_session
from kinetoctl.web.pages.page_context import Daemons, OfHost, OneDaemon, PageContext
from kinetoctl.web.shared.doors import PageUser
from kinetoctl.web.shared.fleet_hosts import FleetDaemons, FleetHosts

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

MAX_USERS = 256
IDLE_S = 3600.0
MAX_RUNNING, MAX_WAITING = 4, 12  # pages of one user
WAIT_S = 20.0
REQUESTS_PER_SECOND, BURST = 20.0, 80.0
_LATER = {"Retry-After": "2"}
_Fetch = Callable[[Any, Any, CommonOptions, Path], list[Path]]


class KeptClient(Client):
    """A client that stays open from page to page; `close` ends it."""

    def __exit__(self, *_error: object) -> None:
        """Leaves it open."""


class UserAnalyses:
    """The results of one user's traces, apart from those of others. folder: the user's; common: of nobody."""

    def __init__(self, queue: AnalysisQueue, folder: Path, common: Path) -> None:
        self._queue = queue
        self._folder = folder
        self._common = common

    def result(self, of: str, job: dict[str, Any], *, wait_s: float) -> Any:
        """The value of a job on the files whose identity is `of`. Raises Computing, AnalysisFailed, TooBusy."""
        return self._queue.result(of, self._placed(job), wait_s=wait_s)

    def fresh(self, of: str, job: dict[str, Any]) -> Any:
        """The value of a job that is not remembered: a file, which is one of the user's. Raises AnalysisFailed."""
        value = self._queue.fresh(of, self._placed(job))
        path = Path(value["path"]) if isinstance(value, dict) and isinstance(value.get("path"), str) else None
        if path is None or not path.resolve().is_relative_to(self._folder.resolve()) or not path.is_file():
            raise AnalysisFailed("the analysis process named a file that does not belong to its user")
        return {"path": str(path.resolve())}

    def _placed(self, job: dict[str, Any]) -> dict[str, Any]:
        """The job with the folder that its worker is confined to."""
        return {**job, "folder": str(self._folder if "paths" in job else self._common)}


class UserSpace:
    """What one user has here."""

    def __init__(self, context: PageContext, close: Callable[[], None], clock: Callable[[], float]) -> None:
        self.context = context
        self.session = new_session(float("inf"))
        self.close = close
        self.seen_s = clock()
        self.present = 0  # requests that are here
        self._clock = clock
        self._running = threading.BoundedSemaphore(MAX_RUNNING)
        self._left, self._left_at_s = BURST, self.seen_s

    def admit(self) -> None:
        """Counts a request. Raises WebError if there are too many."""
        now = self._clock()
        self._left = min(BURST, self._left + (now - self._left_at_s) * REQUESTS_PER_SECOND)
        self._left_at_s = self.seen_s = now
        if self._left < 1 or self.present >= MAX_RUNNING + MAX_WAITING:
            raise WebError(HTTPStatus.TOO_MANY_REQUESTS, "too many requests at once: wait a moment", _LATER)
        self._left -= 1
        self.present += 1

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for one of the user's turns. Raises WebError."""
        if not self._running.acquire(timeout=WAIT_S):
            raise WebError(
                HTTPStatus.SERVICE_UNAVAILABLE, "your other pages are still being computed: wait a moment", _LATER
            )
        try:
            yield
        finally:
            self._running.release()


class UserSpaces:
    """The spaces of all users. Thread-safe; `close` removes everything. root: a folder of the server's own."""

    def __init__(
        self,
        settings: CommonOptions,
        queue: AnalysisQueue,
        root: Path,
        *,
        ui_origin: str,
        most_bytes: int,
        hosts: FleetHosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """hosts: those of a fleet, instead of the daemon of the settings."""
        self._settings = settings
        self._hosts = hosts
        self._queue = queue
        self._root = root
        self._ui_origin = ui_origin
        self._most_bytes = most_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._spaces: OrderedDict[PageUser, UserSpace] = OrderedDict()
        self._common = Path(mkdtemp(prefix="common-", dir=root))

    @contextmanager
    def entered(self, user: PageUser) -> Iterator[UserSpace]:
        """The user's space, within the user's limits. Raises WebError."""
        with self._lock:
            space, gone = self._space(user)
            space.admit()
        for each in gone:
            each.close()
        try:
            with space.turn():
                yield space
        finally:
            with self._lock:
                space.present -= 1

    def close(self) -> None:
        """Ends all spaces."""
        with self._lock:
            spaces = list(self._spaces.values())
            self._spaces.clear()
        for space in spaces:
            space.close()

    def _space(self, user: PageUser) -> tuple[UserSpace, list[UserSpace]]:
        """The user's space, and those that have to go for a new one. Raises WebError."""
        if (space := self._spaces.get(user)) is not None:
            self._spaces.move_to_end(user)
            return space, []
        old = self._clock() - IDLE_S
        free = [each for each, space in self._spaces.items() if not space.present]
        leaving = [each for each in free if self._spaces[each].seen_s < old]
        if not leaving and len(self._spaces) >= MAX_USERS:
            leaving = free[:1]
        if not leaving and len(self._spaces) >= MAX_USERS:
            raise WebError(HTTPStatus.SERVICE_UNAVAILABLE, "this server has too many users at once")
        gone = [self._spaces.pop(each) for each in leaving]
        space = self._spaces[user] = self._made(user)
        return space, gone

    def _made(self, user: PageUser) -> UserSpace:
        kept = ExitStack()
        folder = kept.enter_context(removable_folder("user-", self._root))
        timeout_s = self._settings.timeout_s
        daemons: Daemons
        if self._hosts is not None:
            daemons = FleetDaemons(self._hosts, user.metadata, timeout_s)
        else:
            client = KeptClient(self._settings.address, timeout_s=timeout_s, metadata=user.metadata)
            kept.callback(client.close)
            daemons = OneDaemon(lambda: client, self._settings.address)
        traces = FetchedTraces(self._settings, daemons, folder, self._most_bytes)
        context = PageContext(
            settings=self._settings,
            library=traces,
            queue=UserAnalyses(self._queue, folder, self._common),
            daemons=daemons,
            ui_origin=self._ui_origin,
            scratch=folder,
        )

        def close() -> None:
            traces.close()
            kept.close()

        return UserSpace(context, close, self._clock)


# The captures of one user: downloaded through the daemons, and asked for again before each use.
# Nothing is read in place: what this server's own user may read decides nothing.
class FetchedTraces(TraceLibrary):
    """What one user has looked at, in that user's folder, of at most so many bytes. daemons: asked as that user."""

    def __init__(self, settings: CommonOptions, daemons: "Daemons", folder: Path, most_bytes: int) -> None:
        super().__init__(settings)
        self._daemons = daemons
        self._folder = folder
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[FoundKey, int] = OrderedDict()
        self._parts: dict[str, str] = {}  # of a capture: what there was when it was downloaded
        self._room = threading.Lock()

    def find(self, trace_id: str, wait_s: float = FIND_S) -> TraceSet:
        """The traces of a capture that the user may see now, of the hosts that answer.

        Raises NotFound, Computing and the client's errors.
        """
        self._check(trace_id)
        return super().find(trace_id, wait_s)

    def snapshots(self, trace_id: str, wait_s: float = FIND_S) -> TraceSet:
        """The memory snapshots of a capture that the user may see now. Raises as `find` does."""
        self._check(trace_id)
        return super().snapshots(trace_id, wait_s)

    def _check(self, capture_id: str) -> None:
        """Forgets what the user may not see any more, or is not all that there is. Raises the client's errors."""
        try:
            parts = _described(self._daemons.parts(capture_id).items)
        except CliError:
            self._forget_capture(capture_id)
            raise
        if self._parts.get(capture_id, parts) != parts:
            self._forget_capture(capture_id)
        self._parts[capture_id] = parts

    def _paths(self, capture_id: str, stack: ExitStack) -> tuple[str, ...]:
        found = self._daemons.parts(capture_id).items
        parts = [part for part in found if any(target.files for target in part.item.targets)] or found[:1]
        size = sum(_size(part.item, wanted_format(part.item)) for part in parts)
        return self._fetched((capture_id, self._paths.__name__), parts, size, fetch_trace, stack)

    def _snapshot_paths(self, capture_id: str, stack: ExitStack) -> tuple[str, ...]:
        found = self._daemons.parts(capture_id).items
        parts = [part for part in found if has_snapshot(part.item)] or found[:1]
        size = sum(_size(part.item, SNAPSHOT_FORMAT) for part in parts)
        return self._fetched((capture_id, self._snapshot_paths.__name__), parts, size, fetch_snapshots, stack)

    def _fetched(
        self, key: FoundKey, parts: "Sequence[OfHost[pb.Capture]]", size: int, fetch: _Fetch, stack: ExitStack
    ) -> tuple[str, ...]:
        """What is fetched of all hosts. Raises Refused, NotFound and the client's errors."""
        self._make_room(key, size)
        folder = stack.enter_context(removable_folder("", self._folder))
        with ThreadPoolExecutor(HOSTS_AT_ONCE, thread_name_prefix="fetch") as pool:
            fetched = pool.map(partial(self._of_host, folder, fetch), range(len(parts)), parts)
            return tuple(str(path) for paths in fetched for path in paths)

    def _of_host(self, folder: Path, fetch: _Fetch, number: int, part: "OfHost[pb.Capture]") -> list[Path]:
        """The files of one host, in a folder of their own."""
        own = folder / f"{number:05}"
        own.mkdir()
        with self._daemons.client(part.place) as client:
            return fetch(client, part.item, self._settings, own)

    def _make_room(self, key: FoundKey, size: int) -> None:
        """Forgets what was downloaded first until there is room. Raises Refused."""
        if size > self._most_bytes:
            raise Refused(
                f"capture {key[0]} needs {units.size(size)}, but this server keeps at most "
                f"{units.size(self._most_bytes)} per user (--user-space): use `kinetoctl report`"
            )
        with self._room:
            while self._sizes and sum(self._sizes.values()) + size > self._most_bytes:
                self._forget(next(iter(self._sizes)))
            self._sizes[key] = size

    def _forget_capture(self, capture_id: str) -> None:
        """Removes all that was downloaded of a capture."""
        self._parts.pop(capture_id, None)
        with self._lock:
            keys = [key for key in (*self._sizes, *self._captures) if key[0] == capture_id]
        for key in keys:
            self._forget(key)

    def _forget(self, key: FoundKey) -> None:
        """Removes what was downloaded."""
        self._sizes.pop(key, None)
        with self._lock:
            found = self._captures.pop(key, None)
            if found is not None:
                found.stack.close()


def _described(parts: "Sequence[OfHost[pb.Capture]]") -> str:
    """What tells whether a capture has the same parts, with the same files, as before."""
    return "\n".join(
        f"{part.place.address} {part.item.id} {sum(len(target.files) for target in part.item.targets)}"
        for part in parts
    )


def _size(capture: "pb.Capture", wanted: str) -> int:
    """Bytes of the files of this format."""
    return sum(file.size_bytes for target in capture.targets for file in target.files if file.format == wanted)
