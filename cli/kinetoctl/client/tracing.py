"""One capture on one daemon: create it, follow it to its end, download its files.

Theory of operation
    The daemon owns the capture; this side only follows it. A broken stream is reopened, and a watch starts with
    the complete capture, so nothing is missed. The first Ctrl-C stops the capture in its targets, keeps what was
    recorded and follows until the daemon has stored it; the second exits. While the capture is being created, Ctrl-C
    is only noted, because there is no id yet to stop. Whoever exits before the files are here is told where they are.
"""

import errno
import fcntl
import hashlib
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Protocol

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.atomic_files import is_full, room
from kineto_trace.base.quantities import format_size
from kineto_trace.store.output_formats import ATTACHMENT_SUFFIXES, STORED_SUFFIXES, LogFile

from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import RETRYABLE, Client, Patience
from kinetoctl.errors import CliError, DownloadFailed, FileConflict, Refused, TimedOut, Unreachable, VerificationFailed
from kinetoctl.exit_codes import ExitCode

STATUS_CODES: dict[pb.CaptureStatus, ExitCode] = {
    pb.CAPTURE_STATUS_DONE: ExitCode.DONE,
    pb.CAPTURE_STATUS_PARTIAL: ExitCode.PARTIAL,
    pb.CAPTURE_STATUS_FAILED: ExitCode.FAILED,
    pb.CAPTURE_STATUS_CANCELLED: ExitCode.CANCELLED,
}
FileKey = tuple[int, int, str]  # pid, start time (ns), format
READ_BYTES = 1 << 20
ANSWER_LIMIT_S = 5.0  # a daemon takes about a second per million events
ANSWER_PAUSE_S = 0.1
OnBytes = Callable[[int], None]


class Progress(Protocol):
    """How a capture on one host reports its progress."""

    def note(self, text: str) -> None:
        """A message for the person who waits."""

    def update(self, capture: pb.Capture) -> None:
        """The capture in its current state."""

    def fetching(self, target: pb.Target, received: int, file: pb.TraceFile) -> None:
        """The number of bytes of a file that have arrived."""


class Quiet:
    """Reports nothing, neither of a capture on one host nor of one on many (FleetProgress)."""

    def note(self, text: str) -> None:
        """Discards the message."""

    def update(self, what: object) -> None:
        """Shows nothing."""

    def fetching(self, target: pb.Target, received: int, file: pb.TraceFile) -> None:
        """Shows nothing."""

    def fetched(self, files: int, total: int, size_bytes: int) -> None:
        """Shows nothing."""


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
        progress.note(f"capture {capture.id} has already ended; press Ctrl-C again to exit at once")
        return
    again = "discard it"
    if client.outlives_command:
        again = f"exit at once (`kinetoctl captures delete {capture.id}` discards it)"
    progress.note(
        f"stopping capture {capture.id} in {count} {'process' if count == 1 else 'processes'} and keeping what was "
        f"recorded; press Ctrl-C again to {again}"
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
            self.outcome.problems.append(exc.about(enum_names.target(target)))

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


def await_answer(
    client: Client,
    outcome: Outcome,
    progress: Progress,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Adds the daemon's answer about where the time went to the capture; asks no more after ANSWER_LIMIT_S.

    Without a trace there is none to wait for. Ctrl-C ends the wait. Nothing else is lost if the daemon goes away.
    """
    capture, end, noted = outcome.capture, clock() + ANSWER_LIMIT_S, False
    if all(file.format in ATTACHMENT_SUFFIXES for target in capture.targets for file in target.files):
        return
    try:
        while not capture.HasField("answer") and clock() < end:
            found = client.capture(capture.id)
            if found.HasField("answer"):
                capture.answer.CopyFrom(found.answer)  # an empty one says that nothing will come
                return
            if not noted:
                progress.note("analysing")
                noted = True
            pause(ANSWER_PAUSE_S)
    except CliError:
        return
    except KeyboardInterrupt:
        outcome.interrupted = True


def broken_promise(target: pb.Target, name: str) -> list[CliError]:
    """A target that is DONE has files; a daemon that reports DONE without files must not lead to exit code 0."""
    broken = target.verdict == pb.VERDICT_DONE and not target.files
    return [Refused(f"{name}: the daemon reports DONE, but lists no file")] if broken else []


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
        if client.outlives_command:
            progress.note(f"`kinetoctl captures show {outcome.capture.id}` shows how the capture ended")
        raise
    except KeyboardInterrupt:
        if client.outlives_command:
            progress.note(f"`kinetoctl captures fetch {outcome.capture.id}` downloads the files that the daemon keeps")
        raise
    for target in outcome.capture.targets:
        outcome.problems += broken_promise(target, enum_names.target(target))
    return outcome


# Downloads a stored trace file: resumable, verified, never overwriting another file.
#
# The bytes are written to NAME.part, which stays locked. What an earlier, interrupted
# download left there is kept: it is hashed, and the daemon continues from its size. Once size and SHA-256 match what
# was announced, the file is fsynced and linked to its name, which fails if another file has taken that name. An
# existing file with the right content counts as downloaded. On a full disk nothing is left: it would keep it full.
# The names come from the capture, but unsafe characters are replaced first: no answer of a daemon can make this
# client write outside the folder.
def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".") or "_"


def file_name(capture: pb.Capture, target: pb.Target, file: pb.TraceFile) -> str:
    """kineto-HOST-PID-CAPTURE plus the suffix of the format."""
    suffix = STORED_SUFFIXES.get(file.format, f".{_safe(file.format)}")
    return f"kineto-{_safe(capture.host)}-{target.pid}-{_safe(capture.id)}{suffix}"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_already_there(path: Path, file: pb.TraceFile) -> bool:
    if not path.exists():
        return False
    if path.stat().st_size == file.size_bytes and _sha256(path) == file.sha256:
        return True
    raise FileConflict(f"{path} already exists and is not this trace")


def _open_part(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # the name is predictable: follow no link


def _check_regular(part: Path, stream: BinaryIO) -> None:
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        raise FileConflict(f"{part} already exists and is not a regular file")


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    with open(part, "a+b", buffering=0, opener=_open_part) as stream:
        _check_regular(part, stream)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise FileConflict(f"another kinetoctl is writing {part}") from exc
        yield stream


def _hash_of_part(stream: BinaryIO, file: pb.TraceFile) -> "hashlib._Hash":
    digest = hashlib.sha256()
    if os.fstat(stream.fileno()).st_size > file.size_bytes:
        stream.truncate(0)
    stream.seek(0)
    while block := stream.read(READ_BYTES):
        digest.update(block)
    return digest


class _Fetch:
    """Receives one file of one target into the locked part file."""

    def __init__(
        self, client: Client, capture_id: str, pid: int, file: pb.TraceFile, stream: BinaryIO, on_bytes: OnBytes
    ) -> None:
        self._client = client
        self._capture_id = capture_id
        self._pid = pid
        self._file = file
        self._stream = stream
        self._on_bytes = on_bytes

    def _append(self, chunk: pb.TraceChunk, offset: int) -> None:
        if chunk.HasField("file") and (chunk.file.sha256, chunk.file.size_bytes) != (
            self._file.sha256,
            self._file.size_bytes,
        ):
            raise VerificationFailed(
                f"the daemon sent a different {self._file.format} file from the one that the capture lists"
            )
        if chunk.offset != offset or offset + len(chunk.data) > self._file.size_bytes:
            raise VerificationFailed(
                f"the daemon sent {len(chunk.data)} bytes at offset {chunk.offset}; "
                f"expected offset {offset} of {self._file.size_bytes}"
            )
        rest = memoryview(chunk.data)
        while rest:
            rest = rest[self._stream.write(rest) :]  # unbuffered: it may take less

    def all(self) -> None:
        """Everything that is missing, over as many streams as it takes."""
        digest = _hash_of_part(self._stream, self._file)
        offset = os.fstat(self._stream.fileno()).st_size
        patience = Patience(self._client.timeout_s)
        while offset < self._file.size_bytes:
            try:
                for chunk in self._client.fetch(
                    self._capture_id, pid=self._pid, file_format=self._file.format, offset=offset
                ):
                    self._append(chunk, offset)
                    digest.update(chunk.data)
                    offset += len(chunk.data)
                    self._on_bytes(offset)
                    patience.progressed()
                self._check_complete(offset)
            except RETRYABLE as exc:
                patience.wait(exc)
        if digest.hexdigest() != self._file.sha256:
            raise VerificationFailed(
                f"the SHA-256 of the received {self._file.format} file is {digest.hexdigest()}, "
                f"but the daemon announced {self._file.sha256}"
            )

    def _check_complete(self, offset: int) -> None:
        if offset < self._file.size_bytes:
            raise VerificationFailed(f"the daemon ended the stream after {offset} of {self._file.size_bytes} bytes")


def _publish(part: Path, path: Path) -> None:
    try:
        path.hardlink_to(part)
    except FileExistsError as exc:
        raise FileConflict(f"another program created {path} during the download; the trace is in {part}") from exc
    except OSError:  # a file system without hard links
        part.rename(path)
    else:
        part.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _receive(fetch: _Fetch, stream: BinaryIO) -> None:
    resumed = os.fstat(stream.fileno()).st_size > 0
    try:
        fetch.all()
    except VerificationFailed:
        stream.truncate(0)
        if not resumed:
            raise
        fetch.all()  # perhaps the part of an earlier download was wrong
    os.fsync(stream.fileno())


def _full(path: Path, file: pb.TraceFile, code: int | None) -> str:
    what = (
        f"your disk quota for {path.parent} is used up"
        if code == errno.EDQUOT
        else f"the disk of {path.parent} is full"
    )
    return (
        f"{what}: {path.name} needs {format_size(file.size_bytes)}, {room(path.parent)}; "
        "free up space there or choose another --output-dir"
    )


def download(
    client: Client,
    capture: pb.Capture,
    target: pb.Target,
    file: pb.TraceFile,
    directory: Path,
    *,
    name: str = "",
    on_bytes: OnBytes = lambda _received: None,
) -> Path:
    """Write one trace file into the directory and verify it. Returns its path.

    name: name of the file, by default that of `file_name`. on_bytes: called with the number of bytes received so far.
    Raises DownloadFailed or a subclass for failures on this machine, and the client's errors for those of the daemon.
    """
    path = directory / (name or file_name(capture, target, file))
    part = path.with_name(path.name + ".part")
    try:
        if _is_already_there(path, file):
            return path
        with _locked(part) as stream:
            try:
                _receive(_Fetch(client, capture.id, target.pid, file, stream, on_bytes), stream)
                _publish(part, path)
            except OSError as exc:
                if is_full(exc):
                    part.unlink(missing_ok=True)
                raise
    except OSError as exc:
        if is_full(exc):
            raise DownloadFailed(_full(path, file, exc.errno)) from exc
        raise DownloadFailed(f"{part}: {exc.strerror or exc}") from exc
    return path
