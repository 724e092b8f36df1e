"""A client that starts captures at a steady rate and follows each to its end."""

import hashlib
import itertools
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.daemon import Daemon, watch_to_end

SEVERAL = 8
ENDED_S = 180.0
LATE_S = 1.0
BUFFER_BYTES = 16 << 20  # 64 times the default would be 8 GiB of the machine's memory


@dataclass(frozen=True)
class Plan:
    """pids: busy ones first. Of 20 captures one is of all, five of several, four of a busy one, ten of another one."""

    pids: list[int]
    busy: int
    period_s: float

    def targets(self, number: int) -> tuple[list[int], float]:
        """Number of one capture's targets, and its length in seconds."""
        calm = self.pids[self.busy :]
        if number % 20 == 0:
            return self.pids, 1.0
        if number % 4 == 1:
            return [calm[(number * SEVERAL + each) % len(calm)] for each in range(SEVERAL)], 1.0
        if number % 5 == 2:
            return [self.pids[number % self.busy]], 3.0
        return [calm[(number * 7) % len(calm)]], 2.0


class Captures:
    """Runs the plan; what became of the captures."""

    def __init__(self, daemon: Daemon, plan: Plan) -> None:
        self._daemon = daemon
        self._plan = plan
        self._lock = threading.Condition()
        self._busy: set[int] = set()
        self._numbers = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Starts to count anew."""
        self.started = self.targets = self.records = self.fetched_bytes = self.lost = self.late = 0
        self.verdicts: Counter[str] = Counter()
        self.seconds: list[float] = []  # from a capture's creation to the last of its verdicts
        self.of_all: list[tuple[float, float]] = []  # when captures of all targets began and ended, monotonic
        self.problems: Counter[str] = Counter()
        self._ended: dict[str, pb.Capture] = {}

    def run(self, seconds: float) -> None:
        """Starts captures for so long, and waits for the last one."""
        count = round(seconds / self._plan.period_s)
        began = time.monotonic()
        with ThreadPoolExecutor(32, "capture") as pool:
            for number in itertools.islice(self._numbers, count):
                due = began + (self.started + 1) * self._plan.period_s
                pids, length_s = self._plan.targets(number)
                threading.Event().wait(max(0.0, due - time.monotonic()))
                self._take(pids)
                self.late += time.monotonic() > due + LATE_S
                self.started += 1
                self.targets += len(pids)
                pool.submit(self._follow, pids, length_s)

    def _take(self, pids: list[int]) -> None:
        """Waits until no other capture has one of these: an agent runs one at a time."""
        with self._lock:
            self._lock.wait_for(lambda: not self._busy.intersection(pids), ENDED_S)
            self._busy.update(pids)

    def _follow(self, pids: list[int], length_s: float) -> None:
        began = time.monotonic()
        try:
            capture = self._capture(pids, length_s)
            with self._lock:
                self.seconds.append(time.monotonic() - began)
                if len(pids) == len(self._plan.pids):
                    self.of_all.append((began, time.monotonic()))
                self._judge(capture, pids)
            self._fetch(capture)
        except (grpc.RpcError, ValueError) as exc:
            with self._lock:
                self.lost += len(pids)
                said = exc.details() if isinstance(exc, grpc.Call) else exc
                self.problems[f"capture of {len(pids)}: {said}"] += 1
        finally:
            with self._lock:
                self._busy.difference_update(pids)
                self._lock.notify_all()

    def _capture(self, pids: list[int], length_s: float) -> pb.Capture:
        spec = pb.CaptureSpec(
            selector=pb.Selector(pids=pids), duration_ns=int(length_s * 1e9), buffer_limit_bytes=BUFFER_BYTES
        )
        stub = self._daemon.stub()
        created = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=60)
        return watch_to_end(stub, created.id, ENDED_S)

    def _judge(self, capture: pb.Capture, pids: list[int]) -> None:
        """A verdict is true if it is there for each target, and DONE only with records and a file."""
        self._ended[capture.id] = capture
        missing = set(pids) - {target.pid for target in capture.targets}
        self.lost += len(missing)
        for target in capture.targets:
            verdict = pb.Verdict.Name(target.verdict).removeprefix("VERDICT_")
            self.verdicts[verdict] += 1
            records = sum(counts.records for counts in target.counts)
            self.records += records
            if verdict == "UNSPECIFIED" or (verdict == "DONE" and not (records and target.files)):
                self.lost += 1
                self.problems[f"{verdict} with {records} records and {len(target.files)} files"] += 1
            elif verdict != "DONE":
                self.problems[f"{verdict} {target.reason_code}: {target.reason}"] += 1

    def _fetch(self, capture: pb.Capture) -> None:
        """The last target's file, whole."""
        target = capture.targets[-1]
        if not target.files:
            return
        request = pb.FetchTraceRequest(capture_id=capture.id, pid=target.pid)
        content = b"".join(chunk.data for chunk in self._daemon.stub().FetchTrace(request, timeout=60))
        if hashlib.sha256(content).hexdigest() != target.files[0].sha256:
            raise ValueError("the trace that was fetched is not the one that was announced")
        with self._lock:
            self.fetched_bytes += len(content)

    def check_again(self) -> None:
        """The daemon still says of every capture what it said at its end."""
        for capture_id, ended in self._ended.items():
            kept = self._daemon.stub().GetCapture(pb.GetCaptureRequest(id=capture_id), timeout=10)
            if [target.verdict for target in kept.targets] != [target.verdict for target in ended.targets]:
                self.lost += 1
                self.problems["a verdict has changed since"] += 1
