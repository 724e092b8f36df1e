"""Finds the watchdog of the module faulthandler (dump_traceback_later), which may crash a process that we enter.

Theory of operation
    The watchdog is a native thread. After each period it walks the frames of all threads without the GIL, and reads
    memory that a thread which runs Python, begins or ends has just freed: a race in CPython that the program's own
    threads are exposed to as well. By estimate, one in 2,000 dumps during our threads' work crashes the process, so few
    dumps may coincide with it, and the first touch waits until none is due soon.

    The thread has all signals blocked and waits for a lock with a time limit. Where there is such a thread, the
    interpreter's data is searched for its arguments: a header, the text "Timeout (0:00:05)!", which has the period, and
    beside it the header's length. Another thread can be mistaken for it only after a watchdog that dumped once and was
    not cancelled.
"""

import contextlib
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kinetod.attach.attach_types import AttachError, Deadline
from kinetod.attach.inject.arch import this_machine
from kinetod.attach.inject.thread_policy import standing_call, thread_ids
from kinetod.attach.inspect.process_inspection import read_status
from kinetod.attach.inspect.target_image import TargetImage

SHORTEST_S = 1.0  # minimum period of a process that is entered: at most one dump coincides with the agent's start
QUIET_S = 0.5  # nothing is begun within this time before a dump
_AFTER_S = 0.02  # time after which a dump has been written
_LOOKS, _LOOK_S = 10, 0.001  # it may be dumping
_OURS = "kineto-"
_ALL_SIGNALS = (1 << 64) - 1 & ~sum(1 << number - 1 for number in (9, 19, 32, 33, 34))  # these cannot be blocked
_HEADER = re.compile(rb"Timeout \((\d+):(\d\d):(\d\d)(\.\d{6})?\)!\n")
_SIZE = re.compile(rb"[\x13-\x30]\0{7}")  # its size
_TEXT, _TIME = struct.Struct("<QQ"), struct.Struct("<qq")  # address and size; struct timespec
_MAX_DATA_BYTES = 32 << 20
_CLOCK_REALTIME = 0x100  # in the futex's operation


@dataclass(frozen=True, slots=True)
class TracebackWatchdog:
    """When the watchdog dumps."""

    period_s: float
    left_s: float  # until the next dump; 0: it is dumping, or unknown


def find(image: TargetImage) -> TracebackWatchdog | None:
    """Returns the watchdog that runs in the process; None if there is none."""
    tids = [tid for tid in thread_ids(image) if tid != image.pid and _may_be_one(image, tid)]
    period_s = _period_s(image) if tids else None
    if period_s is None:
        return None
    runs = False
    for _look in range(_LOOKS):
        for tid in tids:
            call = standing_call(image, tid)
            runs = runs or call is None
            if call is not None and call.number == this_machine().futex and call.arguments[3]:
                return TracebackWatchdog(period_s, _left_s(image, call.arguments[1], call.arguments[3]))
        time.sleep(_LOOK_S)
    return TracebackWatchdog(period_s, 0.0) if runs else None


def await_quiet(image: TargetImage, deadline: Deadline) -> None:
    """Waits until no dump is due for QUIET_S."""
    while (found := find(image)) and found.left_s < QUIET_S and not deadline.passed:
        time.sleep(min(found.left_s + _AFTER_S, deadline.left_s))


def _may_be_one(image: TargetImage, tid: int) -> bool:
    status = read_status(image.proc / "task" / str(tid))
    blocked = int(status.get("SigBlk", "0"), 16)
    if blocked & _ALL_SIGNALS != _ALL_SIGNALS or status.get("Name", "").startswith(_OURS):
        return False
    call, machine = standing_call(image, tid), this_machine()
    if call is not None and call.number == machine.futex:
        return bool(call.arguments[3])
    return call is None or call.number not in (*machine.parked_calls, *machine.waiting_calls)  # it may be writing


def _period_s(image: TargetImage) -> float | None:
    for data in _data(image):
        for match in _SIZE.finditer(data):
            at = match.start() - 8
            if at < 0 or at % 8:
                continue
            with contextlib.suppress(OSError, AttachError):
                header, size = _TEXT.unpack_from(data, at)
                if found := _HEADER.fullmatch(image.memory.read(header, size)):
                    hours, minutes, seconds, rest = (float(part or 0) for part in found.groups())
                    return hours * 3600 + minutes * 60 + seconds + rest
    return None


def _data(image: TargetImage) -> Iterator[bytes]:
    """Yields the interpreter's own data, and the mapping without a file that follows its file (bss)."""
    end = -1
    for mapping in image.maps:
        follows = mapping.start == end and not mapping.path
        own = follows or (image.python is not None and mapping.path == image.python.path)
        if own and "w" in mapping.permissions:
            with contextlib.suppress(OSError, AttachError):
                yield image.memory.read(mapping.start, min(mapping.end - mapping.start, _MAX_DATA_BYTES))
        end = mapping.end if own else -1


def _left_s(image: TargetImage, operation: int, limit: int) -> float:
    """Returns the seconds until that point in time."""
    clock = time.CLOCK_REALTIME if operation & _CLOCK_REALTIME else time.CLOCK_MONOTONIC
    with contextlib.suppress(OSError, AttachError):
        seconds, ns = _TIME.unpack(image.memory.read(limit, _TIME.size))
        left: float = seconds + ns * 1e-9 - time.clock_gettime(clock)
        return max(0.0, left)
    return 0.0
