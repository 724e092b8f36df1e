"""Makes captures in a row of a training loop that runs torch.profiler's schedule all the time (profiled_loop.py).

Every trace that the loop makes itself must be whole, and every capture's verdict true:

    DONE     what conflicts with the own profiler: its window meets no own session
    PARTIAL  USER_PROFILER_STARTED, and only of what conflicts
    FAILED   USER_PROFILER_ACTIVE or USER_PROFILER_STARTED, likewise
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from kineto_agent.system import env
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.native import fake_cupti
from support.service.daemon import Daemon, watch_to_end
from support.waiting import until

LOOP = Path(__file__).with_name("profiled_loop.py")
START_DEADLINE_S = 120.0
DURATIONS_MS = (30, 60, 120, 240)
RSS_SLACK_BYTES = 96 << 20  # torch's own profiler comes and goes with tens of MB
MOST_GROWN_BYTES = 512 << 20  # malloc keeps what the largest session of torch's profiler needed
_TOLERANCE_NS = 2_000  # between two readings of the clock in one thread's turn


@dataclass(frozen=True)
class Kind:
    """One kind of capture. types: none for the default activities."""

    name: str
    types: tuple[str, ...] = ()
    options: pb.Options = field(default_factory=pb.Options)
    conflicts: bool = True


KINDS = (
    Kind("everything"),
    Kind("kernels", ("kernel", "gpu_memset")),
    Kind("kernels, waiting", ("kernel",), pb.Options(wait_for_user_profiler=True)),
    Kind("operators", ("cpu_op", "user_annotation"), conflicts=False),
    Kind("Python stacks", ("python_function",), conflicts=False),
    Kind("torch.profiler", ("cpu_op", "python_function"), pb.Options(with_flops=True)),
    Kind("Python's calls", ("python_function",), pb.Options(stack_trace=True, with_stack=True), conflicts=False),
    Kind("torch.profiler, waiting", ("cpu_op",), pb.Options(with_flops=True, wait_for_user_profiler=True)),
)


class Loop:
    """The training loop in its process; `traces` are those that it makes itself."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        self.traces: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, name="loop-output")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = json.loads(line)
            if "ops" in found:
                self.traces.append(found)
            else:
                self.last = found

    def more(self, traces: int = 1) -> None:
        """Waits for the given number of further traces of the loop's own."""
        wanted = len(self.traces) + traces
        until(lambda: len(self.traces) >= wanted or self.process.poll() is not None, "own traces", START_DEADLINE_S)

    def end(self) -> int:
        """Ends the loop after its last trace. Returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(START_DEADLINE_S)

    def close(self) -> None:
        """Closes the pipes of a loop that has ended; everything that it said is then in `traces` and `last`."""
        self._reader.join()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def loop(daemon: Daemon, mode: str) -> Iterator[Loop]:
    """A loop whose agent is connected and that has profiled itself twice. mode: FAKE, CPU or CUDA."""
    environ = {**daemon.client_environ(), "PYTHONFAULTHANDLER": "1"}
    if mode == "FAKE":
        environ[env.CUPTI_LIBRARY] = str(fake_cupti())
    command = [sys.executable, "-W", "ignore", str(LOOP), mode]
    with (daemon.root / "loop.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ, text=True
        )
    running = Loop(process, daemon.root / "loop.log")
    try:
        running.more(2)
        yield running
    finally:
        process.kill()
        process.wait()
        running.close()


@dataclass
class Report:
    """Outcome of the captures. problems: none if all is well."""

    verdicts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    captures: list[tuple[Kind, pb.Target]] = field(default_factory=list)
    own: list[str] = field(default_factory=list)  # about the loop's own traces, for people


def offered(stub: ProfilerStub, pid: int) -> set[str]:
    """Activity types of the process once its agent is connected."""

    def types() -> set[str] | None:
        processes = stub.ListProcesses(pb.ListProcessesRequest(), timeout=10).processes
        return next((set(each.activity_types) for each in processes if each.pid == pid and each.activity_types), None)

    return until(types, "the agent is connected", pause_s=0.05)


def capture(stub: ProfilerStub, pid: int, kind: Kind, duration_ms: int) -> pb.Target:
    """Makes one capture to its end; deletes its files."""
    spec = pb.CaptureSpec(
        selector=pb.Selector(pids=[pid]),
        duration_ns=duration_ms * 10**6,
        activity_types=kind.types,
        options=kind.options,
    )
    capture_id = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=30).id
    ended = watch_to_end(stub, capture_id, 120)
    stub.DeleteCapture(pb.DeleteCaptureRequest(id=capture_id), timeout=30)
    return ended.targets[0]


def stress(
    daemon: Daemon,
    mode: str,
    count: int,
    say: Callable[[str], None] = lambda _text: None,
    *,
    names: Sequence[str] = (),
) -> Report:
    """Makes `count` captures in a row, of the kinds `names` (all if empty) in turn."""
    report = Report()
    with loop(daemon, mode) as running:
        pid = running.process.pid
        there = offered(daemon.stub(), pid)
        kinds = [kind for kind in KINDS if set(kind.types) <= there and (not names or kind.name in names)]
        for number in range(count):
            kind = kinds[number % len(kinds)]
            try:
                target = capture(daemon.stub(), pid, kind, DURATIONS_MS[number // len(kinds) % len(DURATIONS_MS)])
            except grpc.RpcError as error:
                report.problems.append(f"capture {number + 1} ({kind.name}): {error.details()}")
                break
            report.captures.append((kind, target))
            verdict = pb.Verdict.Name(target.verdict).removeprefix("VERDICT_")
            report.verdicts[f"{kind.name}: {verdict} {target.reason_code}".rstrip()] += 1
            own = len(running.traces)
            say(f"{number + 1:4d} {kind.name:24s} {verdict:8s} {target.reason_code:22s} own traces {own}")
            if running.process.poll() is not None:
                break
        running.more()
        status = running.end()
    check(report, running, status, mode)
    return report


def check(report: Report, running: Loop, status: int, mode: str) -> None:
    """Checks everything that must hold."""
    problems = report.problems
    if status != 0:
        said = running.log.read_text(errors="replace")[-6000:]
        problems.append(f"the loop ended with {status} and said: {said}")
    if running.last.get("misused"):
        problems.append(f"CUPTI was misused {running.last['misused']} times")
    for what in ("ops", "kernels") if mode != "CPU" else ("ops",):
        counts = Counter(number for trace in running.traces for number in trace[what])
        report.own.append(f"{len(running.traces)} own traces, {what} (per step or session: how often): {dict(counts)}")
        if len(counts) != 1 or 0 in counts:
            problems.append(f"{what} of the own traces' steps differ: {dict(counts)}")
    for number, (kind, target) in enumerate(report.captures):
        problems += [f"capture {number + 1} ({kind.name}): {text}" for text in untrue(kind, target, running.traces)]
    sizes = [trace["rss"] for trace in running.traces]
    tenths = [f"{sizes[place * (len(sizes) - 1) // 10] / 1e6:.0f}" for place in range(11)]
    report.own.append(f"RSS of the loop after each tenth of its traces, MB: {' '.join(tenths)}")
    problems += rss_problems(sizes)


def untrue(kind: Kind, target: pb.Target, traces: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a verdict; empty if nothing is."""
    text = f"{pb.Verdict.Name(target.verdict)} {target.reason_code} {target.reason} {list(target.warnings)}"
    if not kind.conflicts:
        return [] if target.verdict == pb.VERDICT_DONE else [text]
    if target.verdict == pb.VERDICT_DONE:
        begin, end = target.summary.window_start_ns, target.summary.window_end_ns
        met = [own for own in traces if own["begin_ns"] < end - _TOLERANCE_NS and own["end_ns"] > begin + _TOLERANCE_NS]
        return [f"DONE, but its window {begin} {end} meets own sessions {met}"] if met else []
    allowed = {
        pb.VERDICT_PARTIAL: ("USER_PROFILER_STARTED",),
        pb.VERDICT_FAILED: ("USER_PROFILER_STARTED", "USER_PROFILER_ACTIVE"),
    }
    right = target.reason_code in allowed.get(target.verdict, ())
    waited = kind.options.wait_for_user_profiler and target.reason_code == "USER_PROFILER_ACTIVE"
    return [] if right and not waited else [text]


def rss_problems(sizes: list[int]) -> list[str]:
    """Problems with the memory of the loop's process.

    Each session of torch's profiler takes tens to hundreds of MB and gives them back to malloc, which keeps some:
    RSS goes up to a level, and up and down there. So the peaks of the third and the last quarter must be equal.
    """
    quarter = len(sizes) // 4
    if quarter < 3:
        return []
    before, after = max(sizes[2 * quarter : 3 * quarter]), max(sizes[3 * quarter :])
    problems = [f"RSS went on growing, from {before / 1e6:.0f} to {after / 1e6:.0f} MB"]
    if after - before <= RSS_SLACK_BYTES:
        problems = []
    if after - sizes[0] > MOST_GROWN_BYTES:
        problems.append(f"RSS grew from {sizes[0] / 1e6:.0f} to {after / 1e6:.0f} MB")
    return problems
