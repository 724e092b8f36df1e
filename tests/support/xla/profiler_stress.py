"""Captures in a row of a JAX training loop that profiles itself all the time (jax_loop.py).

Every trace that the loop makes of itself must be whole, and every capture's verdict true:

    DONE     its window meets no own session
    PARTIAL  USER_PROFILER_STARTED, for jax.profiler
    FAILED   USER_PROFILER_ACTIVE or USER_PROFILER_STARTED
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb

from support.service.daemon import Daemon, watch_to_end
from support.waiting import scaled, until

LOOP = Path(__file__).with_name("jax_loop.py")
DURATIONS_MS = (20, 50, 120, 250)
TYPES = ("cpu_op", "user_annotation")
OWN_STEPS = 5
START_DEADLINE_S = 120.0
_TOLERANCE_NS = 2_000
_RIGHT = {
    pb.VERDICT_PARTIAL: ("USER_PROFILER_STARTED",),
    pb.VERDICT_FAILED: ("USER_PROFILER_STARTED", "USER_PROFILER_ACTIVE"),
}


@dataclass
class StressReport:
    """Outcome of the captures. problems: none if all is well."""

    verdicts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    own_traces: int = 0


def capture(stub: ProfilerStub, pid: int, duration_ms: int, *, wait: bool = False) -> pb.Target:
    """Makes one capture of HLO operations to its end; deletes its files."""
    spec = pb.CaptureSpec(
        selector=pb.Selector(pids=[pid]),
        duration_ns=duration_ms * 10**6,
        activity_types=TYPES,
        options=pb.Options(wait_for_user_profiler=wait),
    )
    capture_id = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(60)).id
    ended = watch_to_end(stub, capture_id, 120)
    stub.DeleteCapture(pb.DeleteCaptureRequest(id=capture_id), timeout=scaled(30))
    return ended.targets[0]


def stress(daemon: Daemon, count: int, say: Callable[[str], None] = lambda _text: None) -> StressReport:
    """Makes so many captures in a row, every third of which waits until the loop's own profiler has ended."""
    report, own = StressReport(), list[dict[str, Any]]()
    targets: list[pb.Target] = []
    with (daemon.root / "loop.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(LOOP), "--profile-all-the-time"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=daemon.client_environ(),
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            lines = process.stdout
            reader = threading.Thread(target=lambda: own.extend(map(json.loads, lines)))
            reader.start()
            until(lambda: len(own) >= 2, "own traces", START_DEADLINE_S)
            for number in range(count):
                target = capture(daemon.stub(), process.pid, DURATIONS_MS[number % 4], wait=number % 3 == 2)
                targets.append(target)
                name = pb.Verdict.Name(target.verdict).removeprefix("VERDICT_")
                report.verdicts[f"{name} {target.reason_code}".rstrip()] += 1
                say(f"{number + 1:4d} {name:8s} {target.reason_code:22s} own traces {len(own)}")
            process.stdin.close()
            status = process.wait(START_DEADLINE_S)
            reader.join()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        log.seek(0)
        said = log.read()
    if status != 0 or said:
        report.problems.append(f"the loop ended with {status} and said: {said[-4000:]}")
    traces = [each for each in own if "train" in each]
    report.own_traces = len(traces)
    steps = Counter(each["train"] for each in traces)
    if set(steps) != {OWN_STEPS}:
        report.problems.append(f"steps in the own traces: {dict(steps)}")
    if any(not each["operations"] for each in traces):
        report.problems.append("an own trace has no HLO operations")
    for number, target in enumerate(targets):
        report.problems += [f"capture {number + 1}: {text}" for text in untrue(target, traces)]
    return report


def untrue(target: pb.Target, traces: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a verdict; empty if nothing is."""
    if target.verdict == pb.VERDICT_DONE:
        begin, end = target.summary.window_start_ns, target.summary.window_end_ns
        first, last = begin + _TOLERANCE_NS, end - _TOLERANCE_NS
        met = [own for own in traces if own["open_ns"] < last and own["close_ns"] > first]
        return [f"DONE, but its window {begin} {end} meets own sessions {met}"] if met else []
    right = target.reason_code in _RIGHT.get(target.verdict, ())
    named = "jax.profiler" in target.reason
    return [] if right and named else [f"{pb.Verdict.Name(target.verdict)} {target.reason_code} {target.reason}"]
