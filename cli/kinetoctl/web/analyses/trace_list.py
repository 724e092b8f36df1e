"""The list of traces that the command line names: the runs that there are now, those that were there, and URLs.

Theory of operation
    Whoever asks for the list gets what was found last; if that is older than LOOK_S, one thread looks again, and no
    page waits for it. A look that takes long is followed by a pause that is PAUSE times as long. An address stays
    valid when its run is grouped otherwise, and when it is gone the list says so.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path

from kinetoctl.web.analyses.trace_runs import MAX_FILES, Run, RunFinder

LOOK_S = 1.0
PAUSE = 10
FIRST_S = 0.7  # that the first page waits for the first look
WRITING_S = 5.0  # a file that changed so lately is being written
MAX_LISTED = 500
MAX_GONE = 50
MAX_KNOWN = 20_000
_ID_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTrace:
    """One line of the list. name: what people call it; words: what names it on a command line.

    files: how many; None if it is not known. changed_s: in seconds since 1970, 0 if it is not known. state: empty if
    there is nothing to be said. problem: why it cannot be shown.
    """

    id: str
    name: str
    words: tuple[str, ...]
    files: int | None = None
    size_bytes: int = 0
    changed_s: float = 0.0
    state: str = ""
    problem: str = ""


class TraceList:
    """The runs of files, folders and patterns. Thread-safe.

    clock: of changes of files, in seconds since 1970; timer: seconds that only grow.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._finders = {argument: RunFinder(argument) for argument in arguments}
        self._clock, self._timer = clock, timer
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._listed: dict[str, Run] = {}
        self._known: OrderedDict[str, Run] = OrderedDict()
        self._gone: OrderedDict[str, Run] = OrderedDict()
        self._due_s = float("-inf")
        self._looking: Future[None] | None = None
        self._found = 0
        self.looked = not arguments

    def close(self) -> None:
        """Looks no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def changes(self) -> bool:
        """Whether there may be others later."""
        return any(finder.changes for finder in self._finders.values())

    def traces(self) -> list[ListedTrace]:
        """What was found last, and what is gone since. Waits a moment for the first look."""
        self._look_if_due()
        with self._lock:
            return [self._shown(each, run) for each, run in self._listed.items()] + [
                ListedTrace(id=each, name=run.name, words=run.paths, state="gone") for each, run in self._gone.items()
            ]

    def find(self, trace_id: str) -> Run | None:
        """The run of this id that there is, or was."""
        self._look_if_due()
        with self._lock:
            return self._known.get(trace_id)

    def notes(self) -> list[str]:
        """What is to be said of the list."""
        with self._lock:
            full = [argument for argument, finder in self._finders.items() if finder.full]
            left = self._found - len(self._listed)
        notes = [
            f"{argument} has more than {MAX_FILES:,} files that may be traces: the first ones were looked at. "
            "Name a folder in it, or a pattern, to see others."
            for argument in full
        ]
        if left:
            notes.append(f"The {MAX_LISTED} traces that changed last are shown, {left:,} others are not.")
        return notes

    def look(self) -> None:
        """Looks for the runs that there are now."""
        runs = {id_of(run.place): run for finder in self._finders.values() for run in finder.find()}
        latest = sorted(runs, key=lambda each: runs[each].changed_s, reverse=True)[:MAX_LISTED]
        chosen = set(latest)
        with self._lock:
            vanished = [each for each in self._listed if each not in runs]
            for each in vanished:
                if not any(Path(file).exists() for file in self._listed[each].files):
                    self._gone[each] = self._listed[each]
            self._gone = OrderedDict([pair for pair in self._gone.items() if pair[0] not in runs][-MAX_GONE:])
            self._found = len(runs)
            self._listed = {each: run for each, run in runs.items() if each in chosen}
            for each, run in runs.items():
                self._known[each] = run
                self._known.move_to_end(each)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            self.looked = True

    def _look_if_due(self) -> None:
        """Starts a look unless there was one a moment ago, and waits a moment for the first one."""
        with self._lock:
            if self._looking is None and self._timer() >= self._due_s:
                self._looking = self._pool.submit(self._timed_look)
            first = self._looking if not self.looked else None
        if first is not None:
            try:
                first.result(FIRST_S)
            except FutureTimeout:
                return

    def _timed_look(self) -> None:
        began = self._timer()
        try:
            self.look()
        finally:
            with self._lock:
                ended = self._timer()
                self._due_s = ended + max(LOOK_S, PAUSE * (ended - began))
                self._looking = None

    def _shown(self, trace_id: str, run: Run) -> ListedTrace:
        return ListedTrace(
            id=trace_id,
            name=run.name,
            words=run.paths,
            files=len(run.files),
            size_bytes=run.size_bytes,
            changed_s=run.changed_s,
            state="being written" if 0 <= self._clock() - run.changed_s < WRITING_S else "",
        )


def id_of(place: str) -> str:
    """The same for the same file or URL each time, so that addresses stay."""
    named = place if "://" in place else str(Path(place.partition("\0")[0]).resolve()) + place.partition("\0")[2]
    return hashlib.sha256(named.encode("utf-8", "surrogateescape")).hexdigest()[:_ID_DIGITS]
