"""The captures of one user: downloaded through the daemons, and asked for again before each use.

Nothing is read in place: what this server's own user may read decides nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.fleet.fleet_files import HOSTS_AT_ONCE
from kinetoctl.errors import CliError, Refused
from kinetoctl.options.trace_arguments import fetch_trace, wanted_format
from kinetoctl.output import units
from kinetoctl.web.analyses.trace_library import FIND_S, TraceLibrary, TraceSet

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.web.pages.daemons import Daemons, OfHost


class FetchedTraces(TraceLibrary):
    """What one user has looked at, in that user's folder, of at most so many bytes. daemons: asked as that user."""

    def __init__(self, settings: CommonOptions, daemons: "Daemons", folder: Path, most_bytes: int) -> None:
        super().__init__(settings)
        self._daemons = daemons
        self._folder = folder
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._parts: dict[str, str] = {}  # of a capture: what there was when it was downloaded
        self._room = threading.Lock()

    def find(self, trace_id: str, wait_s: float = FIND_S) -> TraceSet:
        """The traces of a capture that the user may see now, of the hosts that answer.

        Raises NotFound, Computing and the client's errors.
        """
        try:
            parts = _described(self._daemons.parts(trace_id).items)
        except CliError:
            self._forget(trace_id)
            raise
        if self._parts.get(trace_id, parts) != parts:
            self._forget(trace_id)
        self._parts[trace_id] = parts
        return super().find(trace_id, wait_s)

    def _paths(self, capture_id: str, stack: ExitStack) -> tuple[str, ...]:
        found = self._daemons.parts(capture_id).items
        parts = [part for part in found if any(target.files for target in part.item.targets)] or found[:1]
        self._make_room(capture_id, sum(_size(part.item) for part in parts))
        folder = Path(stack.enter_context(TemporaryDirectory(dir=self._folder)))
        with ThreadPoolExecutor(HOSTS_AT_ONCE, thread_name_prefix="fetch") as pool:
            fetched = pool.map(partial(self._fetched, folder), range(len(parts)), parts)
            return tuple(str(path) for paths in fetched for path in paths)

    def _fetched(self, folder: Path, number: int, part: "OfHost[pb.Capture]") -> list[Path]:
        """The traces of one host, in a folder of their own."""
        own = folder / f"{number:05}"
        own.mkdir()
        with self._daemons.client(part.place) as client:
            return fetch_trace(client, part.item, self._settings, own)

    def _make_room(self, capture_id: str, size: int) -> None:
        """Forgets what was downloaded first until there is room. Raises Refused."""
        if size > self._most_bytes:
            raise Refused(
                f"capture {capture_id} has {units.size(size)}, more than this server keeps of one user "
                f"({units.size(self._most_bytes)}, --user-space): use `kinetoctl report`"
            )
        with self._room:
            while self._sizes and sum(self._sizes.values()) + size > self._most_bytes:
                self._forget(next(iter(self._sizes)))
            self._sizes[capture_id] = size

    def _forget(self, capture_id: str) -> None:
        """Removes what was downloaded of a capture."""
        self._sizes.pop(capture_id, None)
        self._parts.pop(capture_id, None)
        with self._lock:
            found = self._captures.pop(capture_id, None)
        if found is not None:
            found.stack.close()


def _described(parts: "Sequence[OfHost[pb.Capture]]") -> str:
    """What tells whether a capture has the same parts, with the same files, as before."""
    return "\n".join(
        f"{part.place.address} {part.item.id} {sum(len(target.files) for target in part.item.targets)}"
        for part in parts
    )


def _size(capture: "pb.Capture") -> int:
    """Bytes of the files that are fetched of a capture. Raises NotFound."""
    wanted = wanted_format(capture)
    return sum(file.size_bytes for target in capture.targets for file in target.files if file.format == wanted)
