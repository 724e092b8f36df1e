"""One user takes all that the daemon gives, in every way at once, while another user traces; needs root.

    .venv/bin/python tests/campaign/hostile.py --seconds 600

The other user first traces alone, for a fifth of the time; then as long beside the same number of programs of the
hostile user that only compute; then during the attack. Prints the latencies of all phases and each goal; exit status
1 if one is missed. The daemon is not to blame for the cost of programs that only compute. All programs of the hostile
user run with --nice on the last CPU: sharing the CPUs between users is the kernel's task (systemd gives each user the
same), and a machine with two CPUs has no other way to separate them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import heapq
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
from campaign.parts import hostile_floods
from campaign.parts.goals import Goal
from google.protobuf.message import Message
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.probe import Unwell, ask_daemon
from support.agent.scripted_agent import RemoteAgent
from support.service.calls_as import OK, CallsAs, plain_python
from support.service.daemon import Daemon, running_daemon

ADA, EVE = 61001, 61005
KINDS = ("calls", "streams", "connections", "captures")
CALL_PERIOD_S, TRACE_PERIOD_S, PROBE_PERIOD_S = 0.1, 1.0, 2.0
BEARABLE = 2.0


@dataclass
class Phase:
    """What the user who is not hostile has observed. Times in ms."""

    calls_ms: list[float] = field(default_factory=list)
    traces_ms: list[float] = field(default_factory=list)
    probes_ms: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, str, float]] = field(default_factory=list)  # ms, what, s since the floods' period began
    captures: dict[str, str] = field(default_factory=dict)  # id: SHA-256 of the trace


def percentile(values: list[float], part: float) -> float:
    """Percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


class Ada:
    """Calls, traces and probes, each at its own pace."""

    def __init__(self, daemon: Daemon, user: CallsAs, tracer: CallsAs, agent: RemoteAgent) -> None:
        self._daemon, self._user, self._tracer, self._agent = daemon, user, tracer, agent

    def run(self, seconds: float) -> Phase:
        """Runs for the given time."""
        phase, end = Phase(), time.monotonic() + seconds

        def repeat(action: str, period_s: float) -> None:
            due = time.monotonic()
            while (due := due + period_s) < end:
                threading.Event().wait(max(0.0, due - time.monotonic()))
                getattr(self, action)(phase)

        threads = [
            threading.Thread(target=repeat, args=each)
            for each in (("_call", CALL_PERIOD_S), ("_trace", TRACE_PERIOD_S), ("_probe", PROBE_PERIOD_S))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return phase

    def _ask(self, phase: Phase, who: CallsAs, name: str, request: Message) -> list[Message]:
        answer = who.call(self._daemon.address, name, request)
        if answer.code != OK:
            phase.problems[f"{name}: {answer.code} {answer.reason}: {answer.message[:200]}"] += 1
        return list(answer.messages)

    @staticmethod
    def _took(phase: Phase, what: str, values: list[float], began: float) -> None:
        values.append((time.monotonic() - began) * 1e3)
        phase.slowest = heapq.nlargest(5, (*phase.slowest, (values[-1], what, began % hostile_floods.PERIOD_S)))

    def _call(self, phase: Phase) -> None:
        began = time.monotonic()
        self._ask(phase, self._user, "GetClock", pb.GetClockRequest())
        self._took(phase, "call", phase.calls_ms, began)

    def _trace(self, phase: Phase) -> None:
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[self._agent.pid]), duration_ns=10**8, no_attach=True)
        began = time.monotonic()
        made = self._ask(phase, self._tracer, "CreateCapture", pb.CreateCaptureRequest(spec=spec))
        if not made:
            return
        self._agent.do("capture")
        capture_id = made[0].id  # type: ignore[attr-defined]
        self._ask(phase, self._tracer, "WatchCapture", pb.WatchCaptureRequest(id=capture_id))
        digest = self._fetched(phase, capture_id)
        self._took(phase, "trace", phase.traces_ms, began)
        phase.captures[capture_id] = digest

    def _fetched(self, phase: Phase, capture_id: str) -> str:
        chunks = self._ask(phase, self._tracer, "FetchTrace", pb.FetchTraceRequest(capture_id=capture_id))
        return hashlib.sha256(b"".join(chunk.data for chunk in chunks)).hexdigest()  # type: ignore[attr-defined]

    def lost(self, *phases: Phase) -> int:
        """Captures that can no longer be fetched, or whose content has changed."""
        after = Phase()
        made = {capture_id: digest for phase in phases for capture_id, digest in phase.captures.items()}
        return sum(self._fetched(after, capture_id) != digest for capture_id, digest in self._paced(made))

    @staticmethod
    def _paced(made: dict[str, str]) -> list[tuple[str, str]]:
        time.sleep(5)  # what is within the rate of requests
        return list(made.items())[:150]

    def _probe(self, phase: Phase) -> None:
        began = time.monotonic()
        try:
            ask_daemon(self._daemon.address)
        except Unwell as exc:
            phase.problems[f"probe: {exc}"] += 1
        self._took(phase, "probe", phase.probes_ms, began)


def as_eve(nice: int) -> list[str]:
    """Prefix for commands that run as eve."""
    capability = "-all,+dac_read_search"
    return [
        "nice", "-n", str(nice), "taskset", "-c", str(max(os.sched_getaffinity(0))),
        "setpriv", "--reuid", str(EVE), "--regid", str(EVE), "--clear-groups",
        "--inh-caps", capability, "--ambient-caps", capability,
    ]  # fmt: skip


@contextlib.contextmanager
def burners(seconds: float, nice: int) -> Iterator[None]:
    """Starts programs of eve that only compute."""
    command = [*as_eve(nice), "timeout", str(seconds + 60), sys.executable, "-S", "-c", "while True: pass"]
    programs = [subprocess.Popen(command) for _ in KINDS]
    try:
        yield
    finally:
        for program in programs:
            program.terminate()
            program.wait()


@contextlib.contextmanager
def attackers(address: str, seconds: float, nice: int) -> Iterator[dict[str, Counter[str]]]:
    """Starts eve's attacking programs."""
    programs = [
        subprocess.Popen(
            [*as_eve(nice), sys.executable, hostile_floods.__file__, kind, address, str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path)), "GRPC_VERBOSITY": "NONE"},
        )
        for kind in KINDS
    ]
    told: dict[str, Counter[str]] = {}
    try:
        yield told
        for kind, program in zip(KINDS, programs, strict=True):
            said, _ = program.communicate(timeout=60)
            told[kind] = Counter(json.loads(said or "{}"))
    finally:
        for program in programs:
            program.kill()


def shown(name: str, phase: Phase) -> None:
    for what, values in (("calls", phase.calls_ms), ("traces", phase.traces_ms), ("probes", phase.probes_ms)):
        print(
            f"{name:7s} {what:7s} {len(values):5d}   p50 {percentile(values, 0.5):8.1f} ms   "
            f"p99 {percentile(values, 0.99):8.1f} ms   max {max(values, default=0):8.1f} ms"
        )
    for took_ms, what, at_s in phase.slowest:
        print(f"    {what} of {took_ms:.0f} ms, {at_s:.1f} s into a period of floods")
    for problem, count in phase.problems.most_common(5):
        print(f"    {count} x {problem}")


def main() -> int:
    """Runs the campaign."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--nice", type=int, default=10)
    given = options.parse_args()
    if os.getuid() != 0:
        print("the users are played by root: run this as root", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kinetod-hostile-")))
        folder.chmod(0o755)
        store_bytes = max(8, int(given.seconds / 10)) << 20
        environ = {
            "KINETOD_STORE_MAX_BYTES": str(store_bytes),
            "KINETOD_ACCESS_AUDIT_FILE": str(folder / "audit.jsonl"),
        }
        daemon = stack.enter_context(running_daemon(environ=environ))
        daemon.root.chmod(0o755)
        user, tracer = (stack.enter_context(CallsAs(ADA)) for _ in range(2))
        agent = stack.enter_context(RemoteAgent(daemon.agent_socket, python=plain_python(ADA)))
        agent.do("hello")
        ada = Ada(daemon, user, tracer, agent)
        ada.run(5)  # warms up
        quiet = ada.run(given.seconds / 5)
        shown("quiet", quiet)
        audit = (folder / "audit.jsonl").stat().st_size
        with burners(given.seconds / 5, given.nice):
            burning = ada.run(given.seconds / 5)
        shown("burning", burning)
        with attackers(daemon.address, given.seconds, given.nice) as told:
            ada.run(3)  # they have begun
            attacked = ada.run(given.seconds - 3)
        shown("attack", attacked)
        for kind, counts in told.items():
            print(f"{kind:12s} {dict(counts)}")
        written = (folder / "audit.jsonl").stat().st_size - audit
        print(f"load average {os.getloadavg()}; audit log {written / given.seconds / 1e3:.1f} kB/s")
        log = daemon.log()
        errors = [line for line in log.splitlines() if "Traceback" in line or "Error" in line or "ERROR" in line]
        print(f"daemon's log: {len(log) >> 10} KiB, {len(errors)} errors", *errors[:5], sep="\n    ")
        (Path.cwd() / "build").mkdir(exist_ok=True)
        (Path.cwd() / "build/hostile.log").write_text(log)
        stub = daemon.stub()
        used = Counter[int]()
        token = ""
        while True:
            page = stub.ListCaptures(pb.ListCapturesRequest(page_size=1000, page_token=token), timeout=20)
            for each in page.captures:
                used[each.owner_uid] += each.local_bytes
            if not (token := page.next_page_token):
                break
        print(f"store of {store_bytes >> 10} KiB: " + ", ".join(f"uid {uid} {n >> 10} KiB" for uid, n in used.items()))
        goals = [
            Goal(f"p99 of {what} under attack / quiet", percentile(under, 0.99) / percentile(alone, 0.99), BEARABLE)
            for what, under, alone in (
                ("calls", attacked.calls_ms, quiet.calls_ms),
                ("traces", attacked.traces_ms, quiet.traces_ms),
            )
        ]
        goals += [
            Goal(f"p99 of {what} under attack / while others compute", percentile(a, 0.99) / percentile(b, 0.99))
            for what, a, b in (
                ("calls", attacked.calls_ms, burning.calls_ms),
                ("traces", attacked.traces_ms, burning.traces_ms),
            )
        ]
        goals += [
            Goal("refusals and errors of the other one", attacked.problems.total(), 0),
            Goal("captures of the other one that are lost", ada.lost(quiet, attacked), 0),
        ]
    for goal in goals:
        print(goal)
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    with contextlib.suppress(grpc.FutureTimeoutError):
        sys.exit(main())
