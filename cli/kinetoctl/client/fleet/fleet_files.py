"""The files of a capture of many hosts: fetched from some hosts at a time, and put into one.

Each process's files have the names that they have alone, with the host as it was asked for, in a folder of the
capture's own; what is made of all of them lies beside that folder, which thus is the traces of the ranks and no more.
"""

import contextlib
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import SUFFIXES

from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.download import download, file_name
from kinetoctl.client.fleet.host_run import Fleet, Member, Rank
from kinetoctl.client.tracing import file_key
from kinetoctl.errors import CliError, DownloadFailed, Unreachable
from kinetoctl.output.fleet_progress import FleetProgress

if TYPE_CHECKING:
    from kineto_trace.merge.merged_export import MergedTrace

HOSTS_AT_ONCE = 8


class _Stopped(Exception):
    """The user has gone."""


class Wanted(NamedTuple):
    """One file of one process."""

    target: pb.Target
    file: pb.TraceFile


def folder_of(fleet: Fleet, directory: Path) -> Path:
    """Where the files of the processes go."""
    return directory / f"kineto-{_safe(fleet.id)}"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def check_promises(fleet: Fleet) -> None:
    """A process that is called DONE has files; a daemon that says otherwise must not lead to exit code 0."""
    for member, target in fleet.processes():
        if target.verdict == pb.VERDICT_DONE and not target.files:
            problem = f"{member.place.host} {enum_names.target(target)}: the daemon reports DONE, but no file"
            member.problems.append(DownloadFailed(problem))


def fetch_all(fleet: Fleet, folder: Path, progress: FleetProgress, *, timeout_s: float, file_format: str = "") -> None:
    """Downloads and verifies the files of all hosts; failures are collected, not raised.

    folder exists. file_format: only these; empty: all. KeyboardInterrupt leaves; what has come stays.
    """
    wanted = {
        number: [Wanted(t, file) for t in member.targets for file in t.files if file_format in ("", file.format)]
        for number, member in enumerate(fleet.members)
    }
    fetching = _Fetching(folder, progress, timeout_s, sum(map(len, wanted.values())))
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


class _Fetching:
    """Files on their way here, by several threads."""

    def __init__(self, folder: Path, progress: FleetProgress, timeout_s: float, total: int) -> None:
        self._stop = threading.Event()
        self._clients: list[Client] = []  # of hosts that are being asked
        self._folder, self._progress, self._timeout_s, self._total = folder, progress, timeout_s, total
        self._lock = threading.Lock()
        self._files = self._bytes = 0

    def end(self) -> None:
        """Nothing is fetched any more, also of a host that says nothing just now."""
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

    def of_host(self, member: Member, files: Sequence[Wanted]) -> None:
        """All files of one host, one after the other. Ends early when the user has gone."""
        if member.error is not None:
            member.problems.append(
                DownloadFailed(f"{member.place.host}: {len(files)} files are not here: {member.error}")
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
                        self._failed(member, target, exc)
                        if isinstance(exc, Unreachable):
                            return
        except CliError as exc:
            member.problems.append(exc)
        except _Stopped:
            return

    def _one(self, client: Client, member: Member, target: pb.Target, file: pb.TraceFile) -> Path:
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

    def _failed(self, member: Member, target: pb.Target, exc: CliError) -> None:
        self._progress.note(f"{member.place.host} {enum_names.target(target)}: {exc}")
        member.problems.append(exc)


# ------------------------------------------------------------ one file of all


@dataclass(frozen=True, slots=True)
class MergedFile:
    """What was made of all traces. renumbered: the processes have no ranks that tell them apart, and got some."""

    merged: "MergedTrace"
    renumbered: bool


def merge_all(fleet: Fleet, directory: Path) -> MergedFile | None:
    """One trace of all that are here, beside their folder, by the measured clocks; None: there are none.

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
    """The trace of a process, if it is here; of several the first format that there is. Other files do not count."""
    own = rank.target.pid, rank.target.start_time_ns
    here = ((name, rank.member.paths.get((*own, name))) for name in SUFFIXES)
    return next((_Trace(name, path) for name, path in here if path is not None), None)


def _ranks(processes: Iterable[Rank]) -> list[int]:
    """Of each process; none: some have no rank, or one that another has, too."""
    found = [rank.target.process.rank if rank.target.process.HasField("rank") else -1 for rank in processes]
    return found if -1 not in found and len(set(found)) == len(found) else []
