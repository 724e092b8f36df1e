"""What must hold after a fault: true verdicts, whole files, nothing orphaned, no growth."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_protos.v1.profiler_pb2_grpc import ProfilerStub
from kineto_trace.store.output_formats import STORED_NAMES

from support.machine.descriptors import open_files
from support.waiting import until

ROOT_FILES = {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "lock", "upload.lock", "captures", "trash"}
GROWTH_MIB = 24.0  # of the allocator's own, over hundreds of captures; figures are printed


@dataclass(frozen=True)
class Grounds:
    """What was done to the targets, and therefore may appear in verdicts. Times are Unix ns.

    killed_ns: dead targets, with a time after their death. daemon_killed_ns: a time after the daemon's death.
    reasons, reasons_of: further codes that any target, or the one of that pid, may have.
    """

    killed_ns: Mapping[int, int] = field(default_factory=dict)
    daemon_killed_ns: int = 0
    reasons: frozenset[str] = frozenset()
    reasons_of: Mapping[int, frozenset[str]] = field(default_factory=dict)
    refusals: frozenset[str] = frozenset()

    def may_refuse(self, pids: Sequence[int]) -> frozenset[str]:
        """Codes with which a request for a capture of these targets may have been refused."""
        return self.refusals.union(*(self.reasons_of.get(pid, frozenset()) for pid in pids))


@dataclass(frozen=True)
class Figures:
    """Memory and descriptors of a process at rest."""

    rss_mib: float
    descriptors: int
    children: int
    threads: int
    names: tuple[str, ...] = field(repr=False, default=(), compare=False)
    allowed_growth_mib: float = GROWTH_MIB

    def __str__(self) -> str:
        return (
            f"{self.rss_mib:.1f} MiB, {self.descriptors} descriptors, {self.children} children, {self.threads} threads"
        )


def figures_of(pid: int) -> Figures:
    """Figures of a process; connections of clients do not count."""
    process = psutil.Process(pid)
    names = tuple(open_files(pid).values())
    return Figures(
        rss_mib=process.memory_info().rss / 2**20,
        descriptors=len(names),
        children=len(process.children()),
        threads=process.num_threads(),
        names=names,
    )


def slower_than_idle() -> float:
    """By what factor computation is slower now than alone, measured by a trial or by the load of each core."""
    began, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-c", "import grpc, numpy"], check=True)
    after = os.times()
    computed_s = after.children_user + after.children_system - before.children_user - before.children_system
    return max(1.0, (time.monotonic() - began) / computed_s, os.getloadavg()[0] / (os.cpu_count() or 1))


def check_verdicts(capture: pb.Capture, grounds: Grounds) -> Iterator[str]:
    """The verdicts of the capture's targets for people; raises AssertionError at the first that is not true."""
    for target in capture.targets:
        yield _checked(target, capture.spec.duration_ns, grounds)
    assert capture.status == _status_of({target.verdict for target in capture.targets}), capture
    assert 0 < capture.ended_ns <= time.time_ns() + 10**9 or "CLOCK_SET" in grounds.reasons, capture


def _checked(target: pb.Target, duration_ns: int, grounds: Grounds) -> str:
    name = pb.Verdict.Name(target.verdict).removeprefix("VERDICT_")
    has_trace = [file.format for file in target.files] == ["chrome"]
    if target.verdict == pb.VERDICT_DONE:
        assert has_trace and sum(target.summary.activities.values()) > 0, target
        killed_ns = grounds.killed_ns.get(target.pid)
        assert killed_ns is None or target.collecting_ns + duration_ns <= killed_ns + 50_000_000, target
        if grounds.daemon_killed_ns and target.collecting_ns < grounds.daemon_killed_ns:
            assert target.collecting_ns + duration_ns <= grounds.daemon_killed_ns + 50_000_000, target
        return name
    assert target.verdict in (pb.VERDICT_PARTIAL, pb.VERDICT_FAILED), target
    assert has_trace == (target.verdict == pb.VERDICT_PARTIAL), target
    assert target.reason_code in _allowed(target.pid, grounds), target
    assert target.reason, target
    return f"{name}/{target.reason_code}"


def _allowed(pid: int, grounds: Grounds) -> frozenset[str]:
    allowed = grounds.reasons | grounds.reasons_of.get(pid, frozenset())
    if pid in grounds.killed_ns:
        allowed |= {"TARGET_EXITED", "NO_SUCH_PROCESS", "PROCESS_GONE"}
    if grounds.daemon_killed_ns:
        allowed |= {"DAEMON_RESTARTED"}
    return allowed


def _status_of(verdicts: "set[pb.Verdict]") -> "pb.CaptureStatus":
    if verdicts == {pb.VERDICT_DONE}:
        return pb.CAPTURE_STATUS_DONE
    if verdicts & {pb.VERDICT_DONE, pb.VERDICT_PARTIAL}:
        return pb.CAPTURE_STATUS_PARTIAL
    return pb.CAPTURE_STATUS_FAILED


def check_files(stub: ProfilerStub, state_dir: Path) -> int:
    """Checks that all files verify and each file in the store is a capture's. Returns the number of DONE traces."""
    captures = stub.ListCaptures(pb.ListCapturesRequest(page_size=1000), timeout=10).captures
    expected = Counter[str]()
    done = 0
    for capture in captures:
        assert capture.ended_ns, capture
        checks = list(stub.VerifyCapture(pb.VerifyCaptureRequest(id=capture.id), timeout=30))
        assert [check.problem for check in checks] == [""] * len(checks), checks
        assert len(checks) == sum(len(target.files) for target in capture.targets)
        done += sum(target.verdict == pb.VERDICT_DONE for target in capture.targets)
        for target in capture.targets:
            expected.update(_files_of(capture, target))
    assert {path.name for path in state_dir.iterdir()} <= ROOT_FILES
    assert list((state_dir / "trash").iterdir()) == []
    until(  # what is superfluous goes once the verdict is stored, which takes a while after a full disk
        lambda: found_files(state_dir) == set(expected),
        "no file is orphaned and none is missing",
        state=lambda: found_files(state_dir) ^ set(expected),
    )
    return done


def _files_of(capture: pb.Capture, target: pb.Target) -> Iterator[str]:
    folder = f"{capture.id}/{target.pid}-{target.start_time_ns}"
    if "the raw records are kept in" in target.reason:
        yield from (f"{folder}/target.json", f"{folder}/raw")
    if target.files:
        yield from (f"{folder}/{STORED_NAMES[file.format]}" for file in target.files)
        yield from (f"{folder}/target.json", f"{folder}/columns")


def found_files(state_dir: Path) -> set[str]:
    """Every file in the store as capture/target/file; "columns" and "raw" stand for whole folders."""
    found = set()
    for path in (state_dir / "captures").rglob("*"):
        if path.is_dir():
            continue
        capture, _targets, *rest = path.relative_to(state_dir / "captures").parts
        is_known = len(rest) > 2 and rest[1] in ("columns", "raw") and path.suffix in (".parquet", ".json", ".bin")
        found.add("/".join([capture, *(rest[:2] if is_known else rest)]))
    return found
