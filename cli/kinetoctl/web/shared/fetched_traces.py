"""The captures of one user: downloaded through the daemons, and asked for again before each use.

Nothing is read in place: what this server's own user may read decides nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.temporary_folders import removable_folder
from kinetoctl.client.fleet.fleet_files import HOSTS_AT_ONCE
from kinetoctl.errors import CliError, Refused
from kinetoctl.options.snapshot_arguments import SNAPSHOT_FORMAT, fetch_snapshots, has_snapshot
from kinetoctl.options.trace_arguments import fetch_trace, wanted_format
from kinetoctl.output import units
from kinetoctl.web.analyses.trace_library import FIND_S, FoundKey, TraceLibrary, TraceSet

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.web.pages.daemons import Daemons, OfHost


_Fetch = Callable[[Any, Any, CommonOptions, Path], list[Path]]


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
                f"capture {key[0]} has {units.size(size)}, more than this server keeps of one user "
                f"({units.size(self._most_bytes)}, --user-space): use `kinetoctl report`"
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
