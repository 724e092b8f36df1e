"""The list of traces that the command line names: the runs that there are now, those that were there, and URLs.

Theory of operation
    Whoever asks for the list gets what was found last; if that is older than LOOK_S, one thread looks again, and no
    page waits for it. A look that takes long is followed by a pause that is PAUSE times as long. An address stays
    valid when its run is grouped otherwise, and when it is gone the list says so.
"""

import glob
import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kinetoctl.errors import CliError, trace_errors

if TYPE_CHECKING:
    from kineto_trace.open.trace_source import Source

LOOK_S = 1.0
PAUSE = 10
FIRST_S = 0.7  # that the first page waits for the first look
WRITING_S = 5.0  # a file that changed so lately is being written
MAX_LISTED = 500
MAX_GONE = 50
MAX_KNOWN = 20_000
_ID_DIGITS = 12
MAX_FILES = 10_000  # below one argument
MAX_DEPTH = 6  # folders in folders
_PART = re.compile(r"(?i)(targets|(rank|node|host|worker)[_\-=.]?\d{1,5})")


# What the files below an argument of the command line are: runs, each of which is one entry of the list.
#
# Folders are walked down to MAX_DEPTH, and the files in them that may be traces by their names
# are counted. A folder with such files is a home of runs. Folders that are named after ranks (`rank3`, `node-0`), and
# those of a capture's targets, belong to the folder above. The files of a home are one run if they tell their ranks
# apart, or are workers of a TensorBoard log folder; they are one run for each capture or span if there are several;
# otherwise each file is a run of its own. What is in a home is read again only when its files have changed.
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An entry of the list. place: what its address is made of; name: what people call it; files: its traces.

    paths: what `find_traces` is given, and what names the run on a command line. changed_s: in seconds since 1970.
    """

    place: str
    name: str
    paths: tuple[str, ...]
    files: tuple[str, ...]
    size_bytes: int = 0
    changed_s: float = 0.0


class _File(NamedTuple):
    """A file as the walk found it. changed_s: in seconds since 1970."""

    path: str
    inode: int
    size_bytes: int
    changed_s: float


@dataclass(slots=True)
class _Homes:
    """The homes of runs, in the order in which they were found. full: whether there are more files."""

    files: dict[Path, list[_File]] = field(default_factory=dict)
    count: int = 0
    full: bool = False

    def add(self, home: Path, file: _File) -> None:
        self.full |= self.count >= MAX_FILES
        if not self.full:
            self.files.setdefault(home, []).append(file)
            self.count += 1


class RunFinder:
    """Finds the runs of one argument: a file, a folder or a pattern. `find` is called by one thread at a time.

    full: whether there are more files than are looked at.
    """

    def __init__(self, argument: str) -> None:
        self._argument = argument
        self._known: dict[Path, tuple[Sequence[_File], list[Run]]] = {}
        self.full = False

    @property
    def changes(self) -> bool:
        """Whether there may be other runs later."""
        path = Path(self._argument)
        return not path.exists() or (path.is_dir() and not _is_one(path))

    def find(self) -> list[Run]:
        """The runs that there are now."""
        homes = self._homes()
        self.full = homes.full
        known, self._known = self._known, {}
        for home, files in homes.files.items():
            before, runs = known.get(home, ((), []))
            self._known[home] = files, runs if before == files else _runs(home, files)
        return [run for _, runs in self._known.values() for run in runs]

    def _homes(self) -> _Homes:
        homes, path = _Homes(), Path(self._argument)
        if path.exists():
            self._enter(path, homes)
        else:
            for match in map(Path, sorted(islice(glob.iglob(self._argument, recursive=True), MAX_FILES + 1))):  # noqa: PTH207 - absolute patterns too
                if match.is_dir() and not _is_one(match):
                    self._enter(match, homes)
                elif (file := _file(match)) is not None:
                    homes.add(path, file)
        return homes

    def _enter(self, root: Path, homes: _Homes) -> None:
        if not root.is_dir() or _is_one(root):
            if (file := _file(root)) is not None:
                homes.add(root, file)
            return
        seen: set[tuple[int, int]] = set()
        for folder, depth in _walked(root, seen):
            home = _home(folder, root)
            for path in _candidates(folder, depth):
                if homes.full:
                    return
                if (file := _file(path)) is not None:
                    homes.add(home, file)


def _walked(folder: Path, seen: set[tuple[int, int]], depth: int = MAX_DEPTH) -> Iterator[tuple[Path, int]]:
    """Yields a folder and those below it, each once, with how much deeper one may go. Links are followed."""
    from kineto_trace.open.trace_source import natural_order

    try:
        status = folder.stat()
        key = status.st_dev, status.st_ino
        if key in seen or _is_one(folder):
            return
        seen.add(key)
        with os.scandir(folder) as entries:
            below = [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return  # vanished, or may not be read
    yield folder, depth
    if depth:
        for each in sorted(below, key=natural_order):
            yield from _walked(each, seen, depth - 1)


def _candidates(folder: Path, depth: int) -> list[Path]:
    """What in a folder may be a trace by its name: files, folders of columns, targets of the daemon."""
    from kineto_trace.open.trace_source import TRACE_SUFFIXES, natural_order

    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and (
                    (entry.name.endswith(TRACE_SUFFIXES) and entry.is_file())
                    or (depth and entry.is_dir() and _is_one(Path(entry.path)))
                ):
                    found.append(Path(entry.path))
    except OSError:
        return []
    return sorted(found, key=natural_order)


def _is_one(folder: Path) -> bool:
    """Whether a folder is one trace."""
    from kineto_trace.model.target_info import TARGET_FILE

    return (folder / TARGET_FILE).is_file() or (folder / "strings.parquet").is_file()


def _home(folder: Path, root: Path) -> Path:
    while folder != root and _PART.fullmatch(folder.name):
        folder = folder.parent
    return folder


def _file(path: Path) -> _File | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return _File(str(path), status.st_ino, status.st_size, status.st_mtime)


def _runs(home: Path, files: Sequence[_File]) -> list[Run]:
    """The runs of these files. A file whose beginning cannot be read is a run of its own."""
    if [file.path for file in files] == [str(home)]:
        return [_run(str(home), str(home), (str(home),), files)]
    from kineto_trace.open.trace_discovery import find_traces
    from kineto_trace.open.trace_source import is_trace_file

    below = home.is_dir()
    paths = [file.path for file in files if not below or _is_one(Path(file.path)) or is_trace_file(Path(file.path))]
    try:
        with trace_errors():
            sources = find_traces(*paths, captures="all")
    except CliError:  # a file has just been removed: the next look finds what is left
        return []
    groups: dict[str, list[Source]] = {}
    for source in sources:
        groups.setdefault(source.capture, []).append(source)
    parts = [part for capture, members in groups.items() for part in _parts(capture, members)]
    status = {file.path: file for file in files}
    if len(parts) == 1 and (len(parts[0].files) > 1 or parts[0].told):
        return [_run(str(home), str(home), (str(home),), [status[path] for path in parts[0].files])]
    return [_part_run(home, part, [status[path] for path in part.files]) for part in parts]


class _RunPart(NamedTuple):
    """Files of a home that belong together. told: whether they say so themselves."""

    capture: str
    files: tuple[str, ...]
    told: bool


def _parts(capture: str, members: Sequence["Source"]) -> list[_RunPart]:
    """One part if the files of a capture are its ranks; otherwise each file by itself."""
    told = all(source.rank_from != "order" or source.worker or source.process for source in members)
    apart = len({source.rank for source in members}) == len(members) or all(source.worker for source in members)
    if told and apart:
        return [_RunPart(capture, tuple(str(source.path) for source in members), True)]
    return [_RunPart(capture, (str(source.path),), False) for source in members]


def _part_run(home: Path, part: _RunPart, files: Sequence[_File]) -> Run:
    if len(files) == 1:
        return _run(files[0].path, files[0].path, part.files, files)
    return _run(f"{home}\0{part.capture}", f"{home} ({part.capture})", part.files, files)


def _run(place: str, name: str, paths: tuple[str, ...], files: Sequence[_File]) -> Run:
    return Run(
        place=place,
        name=name,
        paths=paths,
        files=tuple(file.path for file in files),
        size_bytes=sum(file.size_bytes for file in files),
        changed_s=max(file.changed_s for file in files),
    )


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
            f"{argument} has more than {MAX_FILES:,} files that could be traces: only the first ones were read. "
            "To see others, name a folder in it, or a pattern."
            for argument in full
        ]
        if left:
            notes.append(f"The {MAX_LISTED} most recently changed traces are shown; {left:,} others are not.")
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


def identity(paths: Iterable[str | Path]) -> str:
    """A hash of path, inode, size and time of the last change of each file, and of all in folders among them."""
    digest = hashlib.sha256()
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            try:
                status = file.stat()
            except OSError:
                continue  # gone: whoever opens it says so
            digest.update(f"{file}\0{status.st_ino}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    return digest.hexdigest()
