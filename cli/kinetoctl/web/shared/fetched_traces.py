"""The captures of one user: downloaded through the daemon, and asked for again before each use.

Nothing is read in place: what this server's own user may read decides nothing.
"""

import threading
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.errors import CliError, Refused
from kinetoctl.options.trace_arguments import fetch_trace, wanted_format
from kinetoctl.output import units
from kinetoctl.web.analyses.trace_library import FIND_S, TraceLibrary, TraceSet

if TYPE_CHECKING:
    from kinetoctl.client.daemon_client import Client


class FetchedTraces(TraceLibrary):
    """What one user has looked at, in that user's folder, of at most so many bytes. client: asks as that user."""

    def __init__(self, settings: CommonOptions, client: "Client", folder: Path, most_bytes: int) -> None:
        super().__init__(settings)
        self._client = client
        self._folder = folder
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._room = threading.Lock()

    def find(self, trace_id: str, wait_s: float = FIND_S) -> TraceSet:
        """The traces of a capture that the user may see now. Raises NotFound, Computing and the client's errors."""
        try:
            self._client.capture(trace_id)
        except CliError:
            self._forget(trace_id)
            raise
        return super().find(trace_id, wait_s)

    def _paths(self, capture_id: str, stack: ExitStack) -> tuple[str, ...]:
        capture = self._client.capture(capture_id)
        wanted = wanted_format(capture)
        size = sum(file.size_bytes for target in capture.targets for file in target.files if file.format == wanted)
        self._make_room(capture_id, size)
        folder = Path(stack.enter_context(TemporaryDirectory(dir=self._folder)))
        return tuple(map(str, fetch_trace(self._client, capture, self._settings, folder)))

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
        with self._lock:
            found = self._captures.pop(capture_id, None)
        if found is not None:
            found.stack.close()
