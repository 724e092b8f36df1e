"""A host under load whose parts are killed: the daemon, its agents, the captures begun, and what must hold.

Theory of operation
    A `Site` is one daemon and some programs with an agent, which work all the time. A fault happens at some moment of
    the running captures; then `Site.settle` waits until each of them has its verdict and compares it with what was
    done to its target. A capture is begun with an idempotency key: if the daemon died before it answered, asking
    again shows what became of the capture. What must hold after each fault comes first.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import STORED_NAMES
from kinetod.attach_helper.attach_pool import WARM_HELPERS
from support.machine.descriptors import open_files
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.targets.programs import Program, ready_pids
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


SERVES_S = 5.0
SETTLED_S = 60.0
AGENTS_BACK_S = 60.0  # their pauses double while the daemon is away
CALL_S = 10.0
KEPT = {
    "kinetod.captures.result.decode_worker": 2,
    "kinetod.attach_helper.attach_worker": WARM_HELPERS,
}  # processes that the daemon keeps while nobody asks
MILLISECOND_NS = 1_000_000
# Half of a core's work in iterations, until its standard input ends.
WORK = """
import sys, threading, time
import kineto_agent
kineto_agent.start()
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
def crunch_numbers():
    return sum(i * i for i in range(5_000))
print("ready", flush=True)
while True:
    crunch_numbers()
    time.sleep(0.004)
    kineto_agent.step()
"""
PLAIN_WORK = WORK.replace("import kineto_agent\nkineto_agent.start()\n", "").replace("    kineto_agent.step()\n", "")


@dataclass
class Begun:
    """One capture that was requested."""

    key: str
    spec: pb.CaptureSpec
    pids: tuple[int, ...]
    id: str = ""
    refusal: str = ""  # the reason code, where the daemon refused it


@dataclass
class Tally:
    """Outcomes, counted over all moments."""

    moments: int = 0
    longest_s: float = 0.0  # until it served again
    longest_agents_s: float = 0.0  # until all agents were connected again
    late: int = 0  # moments after which that took longer than SERVES_S, since others had the cores
    verdicts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    verified: int = 0  # DONE traces
    hits: int = 0  # moments at which the fault met what it was meant for
    before: Figures | None = None
    after: Figures | None = None

    def __str__(self) -> str:
        verdicts = ", ".join(f"{name} {count}" for name, count in sorted(self.verdicts.items()))
        refused = f"; refused: {dict(self.refused)}" if self.refused else ""
        return (
            f"{self.moments} moments ({self.hits} hits), served within {self.longest_s:.2f} s ({self.late} late), "
            f"agents back within {self.longest_agents_s:.2f} s; {verdicts}{refused}; "
            f"{self.verified} DONE traces verified, no file orphaned; {self.before} -> {self.after}"
        )


class Site:
    """One daemon, its agents, and their captures."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.agents: list[Program] = []
        self.begun: list[Begun] = []
        self.tally = Tally()
        self._keys = 0

    # what there is

    def add_agent(self, program: str = WORK) -> Program:
        """Adds a working program; one with an agent connects by itself."""
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=self.daemon.client_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self.agents.append(process)
        return process

    def remove_agent(self, process: Program) -> None:
        """Kills the agent's program, if it still runs, and forgets it."""
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.agents.remove(process)

    def pids(self) -> set[int]:
        """Pids of the agents."""
        return {process.pid for process in self.agents}

    def children(self, module: str) -> list[psutil.Process]:
        """The daemon's child processes that run this module."""
        found = []
        for child in psutil.Process(self.daemon.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    found.append(child)
        return found

    def _processes(self) -> dict[str, int]:
        return {module: len(self.children(module)) for module in KEPT}

    # captures

    def begin(self, *pids: int, milliseconds: int = 300) -> Begun:
        """Requests a capture; a daemon that is gone, or refuses, is no error here."""
        self._keys += 1
        spec = pb.CaptureSpec(
            selector=pb.Selector(pids=pids), duration_ns=milliseconds * MILLISECOND_NS, keep_agent_ns=1
        )
        begun = Begun(f"key {self._keys}", spec, pids)
        self.begun.append(begun)
        self._ask(begun)
        return begun

    def _ask(self, begun: Begun) -> None:
        request = pb.CreateCaptureRequest(spec=begun.spec, idempotency_key=begun.key)
        try:
            begun.id = self.daemon.stub().CreateCapture(request, timeout=CALL_S).id
        except grpc.RpcError as exc:
            if exc.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                begun.refusal = _reason(exc)
        except (ValueError, grpc.FutureTimeoutError):
            return  # as CANCELLED: the channel was closed with the daemon, so it is asked again once that is back

    def begin_in_background(self, *pids: int, milliseconds: int = 300) -> threading.Thread:
        """Begins a capture on a thread, while something else is done."""
        thread = threading.Thread(target=self.begin, args=pids, kwargs={"milliseconds": milliseconds})
        thread.start()
        return thread

    # faults

    def kill_daemon(self) -> tuple[float, int]:
        """Kills the daemon and starts a new one, as a service manager would.

        Returns a monotonic time and a time in Unix ns between the death of the one and the start of the other.
        """
        self.daemon.kill()
        died = time.monotonic(), time.time_ns()
        self.daemon.start()
        return died

    def serves_again(self, since: float) -> None:
        """Waits until the daemon answers calls, within SERVES_S of that moment, and its agents are back.

        The limit applies to the wall clock if the cores are ours; if others use them too, it is corrected for their
        load.
        """
        until(self._answers, "it serves", AGENTS_BACK_S, state=self.daemon.log)
        took_s = time.monotonic() - since
        self.tally.longest_s = max(self.tally.longest_s, took_s)
        self.tally.late += took_s > SERVES_S
        if took_s > SERVES_S:
            slower = slower_than_idle()
            assert took_s / slower <= SERVES_S, (took_s, slower, self.daemon.log())
        until(self._has_agents, "its agents are back", AGENTS_BACK_S, state=self.daemon.log)
        self.tally.longest_agents_s = max(self.tally.longest_agents_s, time.monotonic() - since)

    def _answers(self) -> bool:
        try:
            self.daemon.stub().ListCaptures(pb.ListCapturesRequest(page_size=1), timeout=SERVES_S)
        except (grpc.RpcError, grpc.FutureTimeoutError):
            return False
        return True

    def _has_agents(self) -> bool:
        request = pb.ListProcessesRequest(selector=pb.Selector(helpers=True))
        found = self.daemon.stub().ListProcesses(request, timeout=SERVES_S).processes
        have = {each.pid for each in found if each.agent_state in (pb.AGENT_STATE_READY, pb.AGENT_STATE_BUSY)}
        return self.pids() <= have

    # afterwards

    def settle(self, grounds: Grounds) -> list[pb.Capture]:
        """Waits until every capture has a true verdict and every file is whole and somebody's. Returns the captures."""
        stub = self.daemon.stub()
        captures = []
        for begun in self.begun:
            if not begun.id and not begun.refusal:
                self._ask(begun)
            if begun.refusal:
                assert begun.refusal in grounds.may_refuse(begun.pids), begun
                self.tally.refused[begun.refusal] += 1
                continue
            captures.append(watch_to_end(stub, begun.id, SETTLED_S))
            assert {target.pid for target in captures[-1].targets} == set(begun.pids)
        for capture in captures:
            self.tally.verdicts.update(check_verdicts(capture, grounds))
        until(lambda: self.pids() <= ready_pids(stub), "every agent is free again", state=self.daemon.log)
        self.tally.verified += check_files(stub, self.daemon.state_dir)
        self.tally.moments += 1
        return captures

    def forget(self) -> None:
        """Deletes the captures, so that the store stays small; nothing of them may remain."""
        stub = self.daemon.stub()
        for begun in self.begun:
            if begun.id:
                until(lambda capture_id=begun.id: self._deleted(stub, capture_id), "it can be deleted")  # type: ignore[misc]
        self.begun.clear()
        left = [path.name for name in ("captures", "trash") for path in (self.daemon.state_dir / name).iterdir()]
        assert left == []

    def _deleted(self, stub: ProfilerStub, capture_id: str) -> bool:
        """Deletes the capture. Returns False while its end is not stored yet, after a full disk."""
        try:
            stub.DeleteCapture(pb.DeleteCaptureRequest(id=capture_id), timeout=CALL_S)
        except grpc.RpcError as exc:
            assert _reason(exc) == "CAPTURE_RUNNING", exc
            return False
        return True

    def measure(self) -> Figures:
        """Measures the daemon's memory and descriptors now."""
        return figures_of(self.daemon.pid)

    def _measure_at_rest(self) -> Figures | None:
        """None while a process of KEPT and its pipes are missing, there is one too many, or descriptors change.

        If an idle process was killed, the daemon starts it again only at its next check.
        """
        figures = self.measure()
        return figures if self._processes() == KEPT and self.measure().names == figures.names else None

    def note_before(self) -> None:
        """Records the figures at rest, with which later ones are compared."""
        self.tally.before = until(self._measure_at_rest, "the daemon is at rest", state=self._processes)

    def note_after(self) -> None:
        """Raises AssertionError if anything has grown since `note_before`."""
        assert self.tally.before is not None
        before = self.tally.before

        def no_more_than_before() -> Figures | None:
            now = self._measure_at_rest()
            return now if now is not None and now.descriptors <= before.descriptors else None

        self.tally.after = until(
            no_more_than_before,
            f"no descriptor is left of what was there before: {before}",
            state=lambda: f"{set(self.measure().names) - set(before.names)}, {self._processes()}",
        )
        assert self.tally.after.rss_mib - before.rss_mib <= before.allowed_growth_mib, (before, self.tally.after)


def _reason(error: grpc.RpcError) -> str:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it is a Call too
    info = error_details_pb2.ErrorInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return str(error)
    return str(info.reason)


@contextlib.contextmanager
def site(
    *options: str, agents: int = 2, environ: Mapping[str, str] | None = None, state_dir: Path | None = None
) -> Iterator[Site]:
    """Runs a site with the given number of connected agents."""
    environ = {"KINETOD_ACCESS_REQUESTS_PER_SECOND": "10000", **(environ or {})}
    workers = ("--decode-workers", str(KEPT["kinetod.captures.result.decode_worker"]))
    with running_daemon(*workers, *options, environ=environ, state_dir=state_dir) as daemon:
        running = Site(daemon)
        try:
            for _ in range(agents):
                running.add_agent()
            until(lambda: running.pids() <= ready_pids(daemon.stub()), "every agent is connected", state=daemon.log)
            yield running
        finally:
            for process in list(running.agents):
                running.remove_agent(process)
