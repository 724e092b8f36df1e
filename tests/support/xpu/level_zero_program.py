"""A program that uses an Intel GPU (tests/fakes/level_zero/level_zero_app.py), recorded by a live attach, and the
comparison of what was recorded with what the fake driver itself has logged.
"""

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import kineto_trace as kt
import numpy as np
from kineto_protos.v1 import profiler_pb2 as pb

from support.service.daemon import Daemon, watch_to_end
from support.waiting import scaled
from support.xpu.level_zero import APP, COPY, FILL, KERNEL, Launched, LevelZero, clock_reads, read_log

SECOND_NS = 10**9
_LONG_NS = 600 * SECOND_NS
DONE, STOPPED = ("DONE", ""), ("PARTIAL", "CANCELLED")
TABLES = {KERNEL: "kernel", COPY: "gpu_memcpy", FILL: "gpu_memset"}
# The times of a record are PTI's conversion of the device's clock, renewed every millisecond: a thread that loses its
# processor between two clocks makes those of the next millisecond wrong by as long as that takes.
CLOCK_NS = 50_000  # at the median
CLOCK_MOST_NS = 5_000_000_000


class Program:
    """The running program."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._log = log
        self._children: set[int] = set()

    def tell(self, line: str) -> dict[str, Any]:
        """Says one line, and returns the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the program ended with {self.process.wait()} at {line!r}"
        found: dict[str, Any] = json.loads(answer)
        self._children |= {found.pop("child")} if "child" in found else set()
        return found

    def launched(self) -> list[Launched]:
        """All that the program has launched so far, without what its forked children launch."""
        return [each for each in read_log(self._log) if each.thread not in self._children]

    def is_traced(self) -> bool:
        """Whether calls of Level Zero go through PTI: launches a kernel."""
        before = clock_reads(self._log)
        self.tell("launch 1")
        return clock_reads(self._log) != before

    def end(self) -> tuple[int, str]:
        """Ends it. Returns its exit status, and all that it wrote beside answers."""
        output, errors = self.process.communicate("stop\n", timeout=scaled(30))
        return self.process.returncode, output + errors


@contextmanager
def running(
    level_zero: LevelZero, folder: Path, *options: str, entries: int = 65536, devices: int = 1, **environ: str
) -> Iterator[Program]:
    """The program, ready; killed at the end if it has not ended. environ: FAKE_LEVEL_ZERO_… and others."""
    log = folder / "launched"
    process = subprocess.Popen(
        [level_zero.python, "-W", "ignore", APP, *options],  # a fork beside PTI's thread is what is tested
        env=level_zero.environ(log, entries=entries, devices=devices, **environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith('{"ready"'), f"the program ended with {process.wait()}: {process.communicate()}"
        yield Program(process, log)
    finally:
        process.kill()
        process.communicate()


class Captured(NamedTuple):
    """The only target of a capture, and its trace."""

    id: str  # of the capture
    target: pb.Target
    trace: Any  # kineto_trace.Trace, or None

    @property
    def verdict(self) -> tuple[str, str]:
        """Verdict and reason code."""
        return pb.Verdict.Name(self.target.verdict).removeprefix("VERDICT_"), self.target.reason_code


def capture(
    daemon: Daemon,
    pid: int,
    activities: Sequence[str] = (),
    *,
    during: Callable[[], object] = lambda: None,
    duration_ns: int = 0,
    limit_bytes: int = 0,
    timeout_s: float = 120,
) -> Captured:
    """Traces a process by its pid while `during` runs, which begins once it records.

    duration_ns: of the capture; 0: until `during` is over, when it is ended as by Ctrl-C (STOPPED, if all went well).
    limit_bytes: of all buffers; 0: the usual limit.
    """
    stub = daemon.stub()
    spec = pb.CaptureSpec(
        selector=pb.Selector(pids=[pid]),
        duration_ns=duration_ns or _LONG_NS,
        activity_types=activities,
        buffer_limit_bytes=limit_bytes,
    )
    created = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
    for event in stub.WatchCapture(pb.WatchCaptureRequest(id=created.id), timeout=scaled(timeout_s)):
        targets = [event.target] if event.HasField("target") else list(event.snapshot.targets)
        if any(each.state == pb.TARGET_STATE_COLLECT for each in targets):
            during()
            if not duration_ns:
                stub.CancelCapture(pb.CancelCaptureRequest(id=created.id, keep_partial=True), timeout=scaled(10))
            break
        if any(each.state == pb.TARGET_STATE_ENDED for each in targets):
            break
    ended = watch_to_end(stub, created.id, scaled(timeout_s))
    (target,) = ended.targets
    folders = list((daemon.state_dir / "captures" / created.id).glob("targets/*/columns"))
    return Captured(created.id, target, kt.open_trace(folders[0].parent) if folders else None)


def differences(trace: Any, launched: Sequence[Launched]) -> list[str]:
    """What differs between a trace and what was launched while it was recorded: [] if nothing does.

    Each stream must hold exactly what one thread launched, with equal lengths, names, bytes and devices, and at times
    that are equal but for PTI's conversion. Lengths differ from launch to launch, and return after 4096.
    """
    found = []
    for kind, table in TABLES.items():
        rows, expected = _streams(trace, table), _threads(launched, kind)
        if sorted(map(len, rows.values())) != sorted(map(len, expected.values())):
            found.append(f"{table}: {_lengths(rows)} recorded, {_lengths(expected)} launched")
            continue
        left = list(expected.values())
        for stream, recorded in rows.items():
            same = [each for each in left if _facts(each) == [row[:-1] for row in recorded]]
            if not same:
                found.append(f"{table}: what is on stream {stream} is not what any thread launched")
                continue
            left.remove(same[0])
            found += _clock(table, [row[-1] for row in recorded], [each.unix_ns for each in _in_order(same[0])])
    return found


def _lengths(groups: dict[int, list[Any]]) -> str:
    return " + ".join(str(len(group)) for group in groups.values()) or "0"


def _fact(launched: Launched) -> tuple[Any, ...]:
    name = launched.name if launched.kind == KERNEL else ""
    return launched.end - launched.start, name, launched.bytes, launched.device


def _in_order(launched: Sequence[Launched]) -> list[Launched]:
    return sorted(launched, key=lambda each: (_fact(each), each.unix_ns))


def _facts(launched: Sequence[Launched]) -> list[tuple[Any, ...]]:
    return [_fact(each) for each in _in_order(launched)]


def _threads(launched: Sequence[Launched], kind: int) -> dict[int, list[Launched]]:
    threads: dict[int, list[Launched]] = defaultdict(list)
    for each in sorted(launched):
        if each.kind == kind:
            threads[each.thread].append(each)
    return threads


def _streams(trace: Any, kind: str) -> dict[int, list[tuple[Any, ...]]]:
    """Rows of a table by device and stream: (duration, name, bytes, device, start), in this order."""
    table = trace.tables.get(kind)
    streams: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    if table is None:
        return streams
    size = table["bytes"] if kind != "kernel" else np.zeros(len(table), np.uint64)
    columns = [table[name].tolist() for name in ("start", "duration", "name", "device", "stream")]
    for start, duration, name, device, stream, bytes_ in zip(*columns, size.tolist(), strict=True):
        text = trace.strings[name] if kind == "kernel" else ""
        streams[device << 32 | stream].append((duration, text, bytes_, device, start))
    return {stream: sorted(rows) for stream, rows in streams.items()}


def _clock(table: str, recorded: Sequence[int], launched: Sequence[int]) -> Iterator[str]:
    median, most = _apart(recorded, launched)
    if median > CLOCK_NS or most > CLOCK_MOST_NS:
        yield f"{table}: times are off by {median} ns at the median, {most} at most"


def _apart(recorded: Sequence[int], launched: Sequence[int]) -> tuple[int, int]:
    apart = np.abs(np.array(recorded, np.int64) - np.array(launched, np.int64))
    return (int(np.median(apart)), int(apart.max())) if len(apart) else (0, 0)


def farthest_ns(trace: Any, launched: Sequence[Launched]) -> tuple[int, int]:
    """How far the starts of kernels of one stream are from those in the log: at the median, and at most."""
    (recorded,), (expected,) = _streams(trace, "kernel").values(), _threads(launched, KERNEL).values()
    return _apart([row[-1] for row in recorded], [each.unix_ns for each in _in_order(expected)])


def counts(trace: Any) -> Counter[str]:
    """How many rows each table has; those without any are left out."""
    return Counter({kind: len(table) for kind, table in trace.tables.items() if len(table)})
