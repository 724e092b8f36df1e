"""One capture on one daemon: create it, follow it to its end, download its files.

Theory of operation
    The daemon owns the capture; this side only follows it. A broken stream is reopened, and a watch starts with
    the complete capture, so nothing is missed. The first Ctrl-C stops the capture in its targets, keeps what was
    recorded and follows until the daemon has stored it; the second exits. While the capture is being created, Ctrl-C
    is only noted, because there is no id yet to stop. Whoever exits before the files are here is told where they are.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.requested_names import LogFile

from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.download import download
from kinetoctl.client.retry import RETRYABLE, Patience
from kinetoctl.errors import CliError, DownloadFailed, FileConflict, TimedOut, Unreachable
from kinetoctl.exit_codes import ExitCode

STATUS_CODES: dict[pb.CaptureStatus, ExitCode] = {
    pb.CAPTURE_STATUS_DONE: ExitCode.DONE,
    pb.CAPTURE_STATUS_PARTIAL: ExitCode.PARTIAL,
    pb.CAPTURE_STATUS_FAILED: ExitCode.FAILED,
    pb.CAPTURE_STATUS_CANCELLED: ExitCode.CANCELLED,
}
FileKey = tuple[int, int, str]  # pid, start time (ns), format


class Progress(Protocol):
    """How a capture on one host reports its progress."""

    def note(self, text: str) -> None:
        """A message for the person who waits."""

    def update(self, capture: pb.Capture) -> None:
        """The capture in its current state."""

    def fetching(self, target: pb.Target, received: int, file: pb.TraceFile) -> None:
        """The number of bytes of a file that have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """What to capture and where its files go. directory None: leave them in the daemon's store.

    log_file: names of the files; None for the usual ones.
    """

    spec: pb.CaptureSpec
    idempotency_key: str
    directory: Path | None
    log_file: LogFile | None = None


@dataclass(slots=True)
class Outcome:
    """How it ended. paths: the verified files on this machine; problems: one error per missing file."""

    capture: pb.Capture
    interrupted: bool = False
    paths: dict[FileKey, Path] = field(default_factory=dict)
    problems: list[CliError] = field(default_factory=list)

    def exit_code(self) -> ExitCode:
        """The exit code of the command: DONE only if all requested files are here."""
        if self.interrupted:
            return ExitCode.INTERRUPTED
        if self.problems:
            return ExitCode.PARTIAL if self.paths else self.problems[0].exit_code
        return STATUS_CODES.get(self.capture.status, ExitCode.INTERNAL)


def file_key(target: pb.Target, file: pb.TraceFile) -> FileKey:
    """Names one file of a capture."""
    return target.pid, target.start_time_ns, file.format


def has_ended(capture: pb.Capture) -> bool:
    """Whether every target has its verdict."""
    return capture.status not in (pb.CAPTURE_STATUS_UNSPECIFIED, pb.CAPTURE_STATUS_RUNNING)


def apply_event(capture: pb.Capture, event: pb.CaptureEvent) -> None:
    """Brings the capture up to date."""
    if event.HasField("snapshot"):
        capture.CopyFrom(event.snapshot)
        return
    for target in capture.targets:
        if (target.pid, target.start_time_ns) == (event.target.pid, event.target.start_time_ns):
            target.CopyFrom(event.target)


def follow(client: Client, capture: pb.Capture, patience: Patience) -> Iterator[None]:
    """Keeps capture up to date until it has ended; yields after each change."""
    while not has_ended(capture):
        try:
            for event in client.watch(capture.id):
                apply_event(capture, event)
                patience.progressed()
                yield
            if not has_ended(capture):
                capture.CopyFrom(client.capture(capture.id))  # the daemon closed the stream: is it going down?
                patience.wait(Unreachable(f"the daemon stopped reporting on capture {capture.id}"))
        except TimedOut:  # nothing has changed for as long as a stream may last
            _ask_again(client, capture, patience)
        except RETRYABLE as exc:
            patience.wait(exc)


def _ask_again(client: Client, capture: pb.Capture, patience: Patience) -> None:
    """Updates the capture, if the daemon still answers. Raises TimedOut if it does not."""
    try:
        capture.CopyFrom(client.capture(capture.id))
    except TimedOut:
        raise
    except RETRYABLE as exc:
        patience.wait(exc)
    else:
        patience.progressed()


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Collects the first Ctrl-C instead of raising it; the second raises KeyboardInterrupt."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:  # SIGINT is ignored (a background job), or it is not ours
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def _stop(client: Client, capture: pb.Capture, progress: Progress) -> None:
    count = sum(target.state != pb.TARGET_STATE_ENDED for target in capture.targets)
    if not count:
        progress.note(f"capture {capture.id} has ended already; press Ctrl-C again to exit at once")
        return
    progress.note(
        f"stopping capture {capture.id} in {count} {'process' if count == 1 else 'processes'} and keeping what was "
        f"recorded (`kinetoctl captures delete {capture.id}` discards it); press Ctrl-C again to exit at once"
    )
    capture.CopyFrom(client.cancel(capture.id, keep_partial=True))
    progress.update(capture)


def _follow_or_stop(client: Client, outcome: Outcome, progress: Progress) -> None:
    capture = outcome.capture
    patience = Patience(client.timeout_s)
    while True:
        try:
            if outcome.interrupted:
                _stop(client, capture, progress)
            for _change in follow(client, capture, patience):
                progress.update(capture)
        except KeyboardInterrupt:
            if outcome.interrupted:
                raise
            outcome.interrupted = True
        else:
            return


@dataclass(frozen=True, slots=True)
class _Download:
    """Downloads files of a capture into a folder."""

    client: Client
    outcome: Outcome
    directory: Path
    progress: Progress
    log_file: LogFile | None

    def fetch(self, target: pb.Target, file: pb.TraceFile) -> None:
        """Downloads one file. A failure is recorded in the outcome."""
        try:
            self.outcome.paths[file_key(target, file)] = self._download(target, file)
        except CliError as exc:
            self.progress.note(f"{enum_names.target(target)}: {exc}")
            self.outcome.problems.append(exc)

    def _download(self, target: pb.Target, file: pb.TraceFile) -> Path:
        if self.log_file is not None:
            alone = len(self.outcome.capture.targets) == 1
            try:
                return self._download_as(self.log_file.name(target.pid, file.format, alone=alone), target, file)
            except FileConflict as exc:
                self.progress.note(f"{enum_names.target(target)}: {exc}; using the usual file name")
        return self._download_as("", target, file)

    def _download_as(self, name: str, target: pb.Target, file: pb.TraceFile) -> Path:
        return download(
            self.client,
            self.outcome.capture,
            target,
            file,
            self.directory,
            name=name,
            on_bytes=lambda received: self.progress.fetching(target, received, file),
        )


def fetch_files(
    client: Client,
    outcome: Outcome,
    directory: Path,
    progress: Progress,
    *,
    pid: int = 0,
    file_format: str = "",
    log_file: LogFile | None = None,
) -> None:
    """Download the files of the capture's targets; failures are collected, not raised.

    pid 0 means every target, an empty file_format every format, no log_file the usual names.
    """
    fetching = _Download(client, outcome, directory, progress, log_file)
    for target in outcome.capture.targets:
        for file in target.files:
            if pid in (0, target.pid) and file_format in ("", file.format):
                fetching.fetch(target, file)


def _check_promise(outcome: Outcome, progress: Progress) -> None:
    """A target that is DONE has files; a daemon that reports DONE without files must not lead to exit code 0."""
    for target in outcome.capture.targets:
        if target.verdict == pb.VERDICT_DONE and not target.files:
            problem = f"{enum_names.target(target)}: the daemon reports DONE, but no file"
            progress.note(problem)
            outcome.problems.append(DownloadFailed(problem))


def trace(client: Client, request: TraceRequest, progress: Progress) -> Outcome:
    """Run one capture to its end and download its files. KeyboardInterrupt exits at once."""
    with _noted_interrupts() as interrupts:
        outcome = Outcome(client.create(request.spec, request.idempotency_key))
        progress.note(f"capture {outcome.capture.id} on {outcome.capture.host}")
        progress.update(outcome.capture)
    outcome.interrupted = bool(interrupts)
    try:
        _follow_or_stop(client, outcome, progress)
        if request.directory is not None:
            fetch_files(client, outcome, request.directory, progress, log_file=request.log_file)
    except RETRYABLE:
        progress.note(f"`kinetoctl captures show {outcome.capture.id}` shows how the capture ended")
        raise
    except KeyboardInterrupt:
        progress.note(f"`kinetoctl captures fetch {outcome.capture.id}` downloads what the daemon keeps of it")
        raise
    _check_promise(outcome, progress)
    return outcome
