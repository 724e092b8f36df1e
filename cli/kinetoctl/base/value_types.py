"""Values on the command line: durations, sizes, ranks, ids, labels, start times. Pure; errors say what is expected."""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from kineto_protos import endpoints
from kineto_protos.call_values import ANY_RANK
from kineto_protos.options import Parsed
from kineto_trace.base.quantities import DURATION_UNITS_NS, parse_duration_ns, parse_size_bytes

MAX_DURATION_NS = DURATION_UNITS_NS["d"]  # no trace is that long; the daemon's own limit is far lower
MAX_RANKS = 1_000_000
MAX_GPUS = 1024
_POD_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")  # the latter: a static pod's
_CONTAINER_ID = re.compile(r"[0-9a-f]{12,64}")
_ACTIVITY = re.compile(r"[a-z][a-z0-9_]*")
_COUNTER = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
FOLDER = click.Path(path_type=Path, file_okay=False)
_REMOVED = "-removed"  # suffix of the folder's last name
_TRIES = 100  # each costs a writer one more system call that began before the rename


def parse_positive_duration_ns(text: str) -> int:
    """Like parse_duration_ns, but above zero and at most a day."""
    value = parse_duration_ns(text)
    if value <= 0:
        raise ValueError(f"expected a duration above zero, got {text!r}")
    return _not_too_long(value, text)


def parse_delay_ns(text: str) -> int:
    """Like parse_duration_ns, but zero or more and at most a day."""
    return _not_too_long(parse_keep_ns(text), text)


def parse_keep_ns(text: str) -> int:
    """Like parse_duration_ns, but zero or more."""
    value = parse_duration_ns(text)
    if value < 0:
        raise ValueError(f"expected a duration of zero or more, got {text!r}")
    return value


def _not_too_long(value: int, text: str) -> int:
    if value > MAX_DURATION_NS:
        raise ValueError(f"expected at most 24h, got {text!r}: a longer trace would not fit on a disk")
    return value


def parse_positive_size_bytes(text: str) -> int:
    """Like parse_size_bytes, but above zero."""
    value = parse_size_bytes(text)
    if value == 0:
        raise ValueError(f"expected a size above zero, got {text!r}")
    return value


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks in a text like 0,8-15, ascending and once each. Raises ValueError."""
    return _parse_numbers(text, "ranks like 0,8-15", MAX_RANKS, "ranks")


def parse_ranks_or_all(text: str) -> tuple[int, ...]:
    """Like parse_ranks, but the word all stands for ANY_RANK."""
    return (ANY_RANK,) if text.strip() == "all" else parse_ranks(text)


def parse_gpus(text: str) -> tuple[int, ...]:
    """The GPUs in a text like 0,2-3, ascending and once each. Raises ValueError."""
    return _parse_numbers(text, "GPUs like 0,2-3", MAX_GPUS, "GPUs")


def _parse_numbers(text: str, like: str, most: int, what: str) -> tuple[int, ...]:
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part, re.ASCII)
        if match is None:
            raise ValueError(f"expected {like}, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"expected {like}, got {part.strip()!r}, which ends before it starts")
        numbers.update(range(first, min(last, first + most) + 1))
    if len(numbers) > most:
        raise ValueError(f"expected at most {most:,} {what}, got {text!r}")
    return tuple(sorted(numbers))


def parse_pod_uid(text: str) -> str:
    """The UID of a pod, as Kubernetes writes it. Raises ValueError."""
    if _POD_UID.fullmatch(text):
        return text
    raise ValueError(
        f"expected a pod's UID, got {text!r}; `kubectl get pod NAME -o jsonpath={{.metadata.uid}}` prints it"
    )


def parse_container_id(text: str) -> str:
    """The digits of a container's id, at least the first 12, with or without containerd://. Raises ValueError."""
    digits = text.rpartition("://")[2].lower()
    if _CONTAINER_ID.fullmatch(digits):
        return digits
    raise ValueError(f"expected a container's id of 12 to 64 hexadecimal digits, got {text!r}")


def parse_label(text: str) -> tuple[str, str]:
    """Key and value of a text like team=vision. Raises ValueError."""
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise ValueError(f"expected a label like team=vision, got {text!r}")
    return key, value


def parse_activities(text: str) -> tuple[str, ...]:
    """Kineto's activity names in a comma-separated list. Raises ValueError."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if not _ACTIVITY.fullmatch(name):
            raise ValueError(f"expected activity types like kernel,gpu_memcpy, got {text!r}")
    return names


def parse_counters(text: str) -> tuple[str, tuple[str, ...]]:
    """A set of hardware counters, or the vendor's names of metrics, which have a dot. Raises ValueError."""
    names = tuple(part.strip() for part in text.split(","))
    if text.isdecimal():  # the option takes the word behind it
        raise ValueError(
            f"{text} is not a counter set; if it is a process, put it before the option, or use --counters=overview"
        )
    if not all(_COUNTER.fullmatch(name) for name in names):
        raise ValueError(
            f"expected a set listed by `kinetoctl counters sets`, or metrics with a submetric, got {text!r}"
        )
    if len(names) == 1 and "." not in text:
        return names[0], ()
    return "", names


def parse_start_ns(text: str, clock: Callable[[], int] = time.time_ns) -> int:
    """Unix nanoseconds of +10s (from now) or of an ISO 8601 time (local unless it has an offset)."""
    now = clock()
    if text.startswith("+"):
        return now + parse_delay_ns(text[1:])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ValueError(f"expected a start time like +10s or 2030-01-31T12:00:00, got {text!r}") from exc
    start = int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1_000
    if start < now:
        raise ValueError(f"expected a start time in the future, got {text!r}")
    return start


def parse_regex(text: str) -> str:
    """A regular expression, unchanged. Raises ValueError if it is empty or invalid."""
    try:
        re.compile(text)
    except re.error as exc:
        raise ValueError(f"expected a regular expression, got {text!r}: {exc}") from exc
    if not text:
        raise ValueError("expected a regular expression, got an empty one; `.` matches every command")
    return text


DURATION = Parsed("duration", parse_positive_duration_ns)
DELAY = Parsed("duration", parse_delay_ns)
KEEP = Parsed("duration", parse_keep_ns)
SIZE = Parsed("size", parse_positive_size_bytes)
RANKS = Parsed("ranks", parse_ranks)
RANKS_OR_ALL = Parsed("ranks", parse_ranks_or_all)
GPUS = Parsed("gpus", parse_gpus)
POD_UID = Parsed("uid", parse_pod_uid)
CONTAINER_ID = Parsed("id", parse_container_id)
LABEL = Parsed("key=value", parse_label)
COUNTERS = Parsed("set|metric,…", parse_counters)
ACTIVITIES = Parsed("names", parse_activities)
START = Parsed("time", parse_start_ns)
REGEX = Parsed("regex", parse_regex)
ADDRESS = Parsed("address", endpoints.parse_address)


def prepare_folder(folder: Path, option: str = "--output-dir") -> Path:
    """Create the folder if it is missing. Raises UsageError if it cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise click.UsageError(f"{option}: {folder} cannot be created: {exc.strerror}") from exc
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.UsageError(f"{option}: {folder} is not writable")
    return folder


# Temporary folders that may be removed while another thread still writes into them.
#
# The folder is renamed before its contents are removed. A writer that goes on names files by the
# old path, which no longer exists, so it fails with an OSError instead of adding a file to a folder that is being
# emptied. For that, no writer may create the folder itself anew (Path.mkdir with `parents`). A system call of the
# writer that had resolved the old path before can still add one entry; the contents are then removed once more.
@contextmanager
def removable_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Provides a new folder for the duration of the block. parent: instead of the system's folder for such files."""
    with TemporaryDirectory(prefix=prefix, dir=parent) as name:
        folder = Path(name)
        try:
            yield folder
        finally:
            with suppress(FileNotFoundError):  # somebody else has removed it
                _remove(folder.rename(folder.with_name(folder.name + _REMOVED)))


def _remove(folder: Path) -> None:
    for _ in range(_TRIES - 1):
        try:
            shutil.rmtree(folder)
        except OSError as exc:
            if exc.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    shutil.rmtree(folder)
