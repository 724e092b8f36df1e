"""The files of a capture of many hosts: downloaded from several hosts at a time, and merged into one.

The files of each process have their usual names, with the host as it was named, in a folder for the capture. The merged
file lies beside that folder, which thus contains the traces of the ranks and nothing else.
"""

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import SUFFIXES

from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.host_run import Fleet, FleetProgress, HostRun, Rank
from kinetoctl.client.tracing import broken_promise, download, file_key, file_name
from kinetoctl.errors import CliError, DownloadFailed, TraceUnreadable, Unreachable, trace_errors, write_errors

if TYPE_CHECKING:
    from kineto_trace.merge.merged_export import MergedTrace

HOSTS_AT_ONCE = 8
MOST_ANSWERED = 16  # traces: the result of the capture waits until they have been analysed


class _Stopped(Exception):
    """The user has stopped the download."""


class WantedFile(NamedTuple):
    """One file of one process."""

    target: pb.Target
    file: pb.TraceFile


def folder_of(fleet: Fleet, directory: Path) -> Path:
    """The folder for the files of the processes."""
    return directory / f"kineto-{_safe(fleet.id)}"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def check_promises(fleet: Fleet) -> None:
    """Notes which daemons report DONE without files."""
    for member, target in fleet.processes():
        member.problems += broken_promise(target, f"{member.place.host} {enum_names.target(target)}")


def fetch_all(fleet: Fleet, folder: Path, progress: FleetProgress, *, timeout_s: float, file_format: str = "") -> None:
    """Downloads and verifies the files of all hosts; failures are collected, not raised.

    folder: must exist. file_format: empty for all. After a KeyboardInterrupt, completed files stay.
    """
    wanted = {
        number: [WantedFile(t, file) for t in member.targets for file in t.files if file_format in ("", file.format)]
        for number, member in enumerate(fleet.members)
    }
    fetching = _FleetDownload(folder, progress, timeout_s, sum(map(len, wanted.values())))
    with ThreadPoolExecutor(HOSTS_AT_ONCE, thread_name_prefix="fetch") as pool:
        futures = [
            pool.submit(fetching.of_host, fleet.members[number], files) for number, files in wanted.items() if files
        ]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            fetching.end()
            pool.shutdown(wait=True, cancel_futures=True)


class _FleetDownload:
    """Downloads files in several threads."""

    def __init__(self, folder: Path, progress: FleetProgress, timeout_s: float, total: int) -> None:
        self._stop = threading.Event()
        self._clients: list[Client] = []  # of hosts that are downloading
        self._folder, self._progress, self._timeout_s, self._total = folder, progress, timeout_s, total
        self._lock = threading.Lock()
        self._files = self._bytes = 0

    def end(self) -> None:
        """Stops all downloads, even from hosts that do not answer at the moment."""
        self._stop.set()
        with self._lock:
            clients = tuple(self._clients)
        for client in clients:
            client.close()

    @contextlib.contextmanager
    def _asked(self, address: str) -> Iterator[Client]:
        with Client(address, timeout_s=self._timeout_s) as client:
            with self._lock:
                self._clients.append(client)
            try:
                if self._stop.is_set():
                    raise _Stopped
                yield client
            finally:
                with self._lock:
                    self._clients.remove(client)

    def of_host(self, member: HostRun, files: Sequence[WantedFile]) -> None:
        """Downloads all files of one host, one after the other, until the user stops it."""
        if member.error is not None:
            member.problems.append(
                DownloadFailed(f"{member.place.host}: files not downloaded ({len(files)}): {member.error}")
            )
            return
        try:
            with self._asked(member.place.address) as client:
                for target, file in files:
                    try:
                        member.paths[file_key(target, file)] = self._one(client, member, target, file)
                    except ValueError:  # gRPC's, for a call over what `end` has closed
                        if self._stop.is_set():
                            return
                        raise
                    except CliError as exc:
                        if self._stop.is_set():
                            return
                        member.problems.append(exc.about(f"{member.place.host} {enum_names.target(target)}"))
                        if isinstance(exc, Unreachable):
                            return
        except CliError as exc:
            member.problems.append(exc)
        except _Stopped:
            return

    def _one(self, client: Client, member: HostRun, target: pb.Target, file: pb.TraceFile) -> Path:
        def arrived(_received: int) -> None:
            if self._stop.is_set():
                raise _Stopped

        capture = member.capture
        assert capture is not None
        named = pb.Capture(id=capture.id, host=member.place.host)
        name = file_name(named, target, file)
        path = download(client, capture, target, file, self._folder, name=name, on_bytes=arrived)
        with self._lock:
            self._files += 1
            self._bytes += file.size_bytes
            self._progress.fetched(self._files, self._total, self._bytes)
        return path


# ------------------------------------------------------------ one file of all


@dataclass(frozen=True, slots=True)
class MergedFile:
    """The merged trace. renumbered: whether the processes were numbered because ranks are missing or duplicated."""

    merged: "MergedTrace"
    renumbered: bool


def merge_all(fleet: Fleet, directory: Path) -> MergedFile | None:
    """Merges all downloaded traces by the measured clocks, beside their folder. Returns None if there are none.

    Raises the trace library's errors, OSError.
    """
    found = [(rank, trace) for rank in fleet.processes() if (trace := _trace(rank)) is not None]
    if not found:
        return None
    from kineto_trace.collectives.rank_clocks import clock_of
    from kineto_trace.merge.merged_export import merge_traces
    from kineto_trace.open.trace_discovery import Source

    ranks = _ranks(rank for rank, _ in found)
    numbers = ranks or list(range(len(found)))
    sources = [Source(path=trace.path, rank=number) for number, (_, trace) in zip(numbers, found, strict=True)]
    clocks = {
        number: clock_of(rank.member.clock.offset_ns, rank.member.clock.uncertainty_ns)
        for number, (rank, _) in zip(numbers, found, strict=True)
        if rank.member.clock is not None
    }
    file_format = found[0][1].format
    path = directory / f"kineto-{_safe(fleet.id)}{SUFFIXES[file_format]}"
    return MergedFile(merge_traces(sources, path, file_format, clocks=clocks), not ranks)


class _Trace(NamedTuple):
    format: str
    path: Path


def _trace(rank: Rank) -> _Trace | None:
    """The downloaded trace of a process in the first of the known formats, or None. Ignores other files."""
    own = rank.target.pid, rank.target.start_time_ns
    here = ((name, rank.member.paths.get((*own, name))) for name in SUFFIXES)
    return next((_Trace(name, path) for name, path in here if path is not None), None)


def _ranks(processes: Iterable[Rank]) -> list[int]:
    """The rank of each process, or [] if a rank is missing or duplicated."""
    found = [rank.target.process.rank if rank.target.process.HasField("rank") else -1 for rank in processes]
    return found if -1 not in found and len(set(found)) == len(found) else []


def new_id(now_ns: int | None = None) -> str:
    """A new id that sorts by time: 20260131-235959-9f86d0."""
    when = datetime.fromtimestamp((time.time_ns() if now_ns is None else now_ns) // 10**9, UTC)
    return f"{when:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def bring(
    fleet: Fleet, directory: Path, progress: FleetProgress, *, timeout_s: float, file_format: str = ""
) -> Path | None:
    """Download the files. Returns their folder, or None if there are no files. Failures are recorded in the fleet."""
    if not any(target.files for _, target in fleet.processes()):
        return None
    folder = folder_of(fleet, directory)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    fetch_all(fleet, folder, progress, timeout_s=timeout_s, file_format=file_format)
    return folder


def merge_files(fleet: Fleet, directory: Path, progress: FleetProgress) -> MergedFile | None:
    """Merge the traces into one. Returns None if there is no trace, or if merging fails, which the fleet records."""
    progress.note("merging")
    try:
        with trace_errors(), write_errors(directory):
            return merge_all(fleet, directory)
    except CliError as exc:
        fleet.problems.append(TraceUnreadable(f"the traces could not be merged: {exc}"))
        return None


def find_answer(fleet: Fleet, progress: FleetProgress) -> None:
    """Finds out where the time of the job went, from the downloaded traces of up to MOST_ANSWERED processes.

    Traces that cannot be read, or not in the memory that there is, leave the job without an answer: `kinetoctl report`
    says what is wrong with them. So does Ctrl-C, which the fleet records.
    """
    paths = [trace.path for rank in fleet.processes() if (trace := _trace(rank)) is not None]
    if not 0 < len(paths) <= MOST_ANSWERED:
        return
    progress.note("analysing")
    try:
        with trace_errors():
            from kineto_trace.catalog.first_screen import first_screen_of

            found = first_screen_of(paths)
    except (CliError, MemoryError, OSError):
        return
    except KeyboardInterrupt:
        fleet.interrupted = True
    else:
        fleet.answer = pb.CaptureAnswer(verdict=found.verdict, cause=found.cause)
