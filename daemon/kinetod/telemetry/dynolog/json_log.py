"""Lines of metrics as Dynolog's JSON logger writes them, to a file or to the daemon's log.

Theory of operation
    A line is `time = 2026-11-27T03:26:39.123Z data = {"cpu_i":"81.250","uptime":5120}`: Dynolog's without the prefix of
    its log library. Keys are in alphabetical order, fractions are texts with three places, as there. Its time is local
    and says UTC; here it is UTC.

    The file is opened for each line, so it may be moved or deleted at any time, and never through a link. Half of
    MAX_BYTES at most are in it; then it becomes FILE.1, whose content is dropped. In a folder where it cannot be
    renamed (the folder is another's, or the file alone is mounted there) it is emptied instead: the lines that are to
    come count more than those of two weeks ago. The log says so, the first time.

    One line is written at a time, or two threads would both rename, and it is whole or not there at all; what a crash
    of the host has left of one is ended at the next start. What could not be written is counted and said in the log,
    once when it begins and once when it has ended.
"""

import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from kinetod.base.errors import StartError
from kinetod.config.metrics_settings import JSON_LOG_OWN
from kinetod.telemetry.dynolog.host_values import Value

log = logging.getLogger(__name__)
lines = logging.getLogger("kinetod.metrics")

MAX_BYTES = 64 << 20  # a GPU has 400 bytes, a host with 20 interfaces 4 KiB: two weeks of a host with 8 GPUs
_MODE = 0o640  # users' names and jobs are in it


def json_line(time_ns: int, values: Mapping[str, Value]) -> str:
    """One line, without its end. time_ns: Unix."""
    when = datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    shown = {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in values.items()}
    data = json.dumps(shown, sort_keys=True, separators=(",", ":"))
    return f"time = {when}.{time_ns // 10**6 % 1000:03d}Z data = {data}"


class JsonLog:
    """Writes the lines. Thread-safe.

    where: a value of metrics.json_log that is not empty. Raises StartError if the file cannot be written.
    """

    def __init__(self, where: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = None if where == JSON_LOG_OWN else Path(where)
        self._max_bytes = max_bytes
        self._lost = 0
        self._emptied = ""
        self._failure = ""
        self._lock = threading.Lock()
        if self._path is None:
            lines.setLevel(logging.INFO)  # whatever else is logged
            return
        try:
            file = _opened(self._path)
            try:
                _end_line(self._path, file)
            finally:
                os.close(file)
        except OSError as exc:
            raise StartError(
                f"metrics.json_log: {self._path} cannot be written: {exc.strerror}; name a file in a folder that this "
                f"user (uid {os.geteuid()}) and its service may write to"
            ) from exc

    @property
    def problem(self) -> str:
        """Which lines are lost now, and why; empty if none are."""
        return self._failure or self._emptied

    def write(self, time_ns: int, values: Mapping[str, Value]) -> None:
        """Writes one line. Blocks as a disk does. Raises nothing."""
        line = json_line(time_ns, values)
        if self._path is None:
            lines.info("%s", line)
            return
        with self._lock:
            self._write(self._path, line.encode() + b"\n")

    def _write(self, path: Path, data: bytes) -> None:
        try:
            self._append(path, data)
        except OSError as exc:
            self._lost += 1
            self._failure = f"{path} cannot be written: {exc.strerror}"
            if self._lost == 1:
                log.error("metrics.json_log: %s", self._failure)
        else:
            if self._lost:
                log.warning("metrics.json_log: %s can be written again; %d lines are missing", path, self._lost)
            self._lost, self._failure = 0, ""

    def _append(self, path: Path, data: bytes) -> None:
        file = _opened(path)
        try:
            size = os.fstat(file).st_size
            if size and size + len(data) > self._max_bytes // 2:
                if self._set_aside(path):
                    fresh = _opened(path)
                    os.close(file)
                    file = fresh
                else:
                    os.ftruncate(file, 0)
                size = 0
            if os.write(file, data) != len(data):
                os.ftruncate(file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def _set_aside(self, path: Path) -> bool:
        """Renames a full file; returns whether that is possible there."""
        try:
            path.replace(path.with_name(f"{path.name}.1"))
        except OSError as exc:
            emptied = f"{path} is full and cannot be renamed: {exc.strerror}; it is emptied"
            if not self._emptied:
                log.warning("metrics.json_log: %s, now and whenever it has %d MiB", emptied, self._max_bytes >> 21)
            self._emptied = emptied
            return False
        self._emptied = ""
        return True


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, _MODE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def _end_line(path: Path, file: int) -> None:
    """Ends the line that a crash has cut off, if there is one. Raises OSError."""
    size = os.fstat(file).st_size
    try:
        content = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:  # it may only be written to
        return
    try:
        cut = size > 0 and os.pread(content, 1, size - 1) != b"\n"
    finally:
        os.close(content)
    if cut:
        os.write(file, b"\n")
