"""Measures what many agents, many captures and a steady client cost one daemon, and then idleness, against goals.

    .venv/bin/python tests/campaign/load.py [--minutes 10] [--idle-s 60]

64 light Python programs with real agents, the collector and the fake libcupti work under one real daemon. A client
starts 20 captures a minute of one, eight or all of them, watches each to its end, and fetches a trace. A process of
its own calls ListProcesses five times a second. Afterwards the daemon's CPU time is measured while nobody makes
requests, with the agents and without them. Exit status 1 if a goal is missed. Latencies depend on the machine and on
whatever else runs on it; CPU time, memory and verdicts are the daemon's own. Where control groups may be made (as
root), the daemon has one with the unit's CPUQuota= and the programs have another one, as under systemd.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
from campaign.parts.client_load import Captures, Plan
from campaign.parts.goals import Goal
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.control_groups import CpuGroup, cpu_group
from support.machine.descriptors import open_files
from support.machine.native import fake_cupti
from support.machine.usage import Sampler, children, cpu_ns, peak_rss_bytes, rss_bytes
from support.service.daemon import REPOSITORY, Daemon, running_daemon
from support.targets.programs import ready_pids
from support.waiting import until

AGENTS = 64
BUSY_AGENTS = 2  # of them: these launch as much as a training process does
CAPTURES_A_MINUTE = 20
LIST_PERIOD_S = 0.2
CONNECTED_S = 180.0
SETTLED_S = 60.0
# The watchdog as in deploy/systemd/kinetod.service; this one user asks for what many would.
ENVIRON = {"WATCHDOG_USEC": "30000000", "KINETOD_ACCESS_REQUESTS_PER_SECOND": "10000"}
CPU_QUOTA = (1.0, 10)  # cores, period in ms: CPUQuota= and CPUQuotaPeriodSec= there
P99_MS, RSS_BYTES, IDLE_PERCENT = 50.0, 250e6, 0.3
MB = 1e6
# Ten steps a second; waits for nothing else, so that 64 of them leave the machine to the daemon.
PROGRAM = """
import sys, threading, kineto_agent
from support.machine.native import FakeCuda
kernels = int(sys.argv[1])
cuda = FakeCuda()
kineto_agent.start()
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
print("ready", flush=True)
def training_step():
    cuda.memcpy()
    for name in ("gemm<float>", "softmax", "layer_norm", "void elementwise<float, 4>(float*)"):
        cuda.launch(name, kernels // 4)
    kineto_agent.step()
while not over.wait(0.1):
    training_step()
"""


@dataclass(frozen=True)
class Answer:
    """One answer of ListProcesses. at: when it arrived, monotonic; found: number of processes."""

    at: float
    latency_ms: float
    found: int


@contextlib.contextmanager
def agents(daemon: Daemon) -> Iterator[list[int]]:
    """Starts the programs and yields their pids, busy ones first, once the daemon knows them all."""
    environ = daemon.client_environ()
    environ["PYTHONPATH"] += os.pathsep + str(REPOSITORY / "tests")
    environ["KINETO_CUPTI_LIBRARY"] = str(fake_cupti())
    program = daemon.root / "train.py"
    program.write_text(PROGRAM)
    processes = []
    try:
        for number in range(AGENTS):
            kernels = 2000 if number < BUSY_AGENTS else 48
            command = [sys.executable, str(program), str(kernels)]
            processes.append(
                subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        pids = [process.pid for process in processes]
        until(lambda: ready_pids(daemon.stub()) == set(pids), "all agents are connected", CONNECTED_S)
        yield pids
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ask_steadily(address: str) -> int:
    """Calls ListProcesses until standard input ends; prints each latency in ms."""
    over = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=await_end, name="end", daemon=True).start()
    with grpc.insecure_channel(address) as channel:
        stub = ProfilerStub(channel)
        next_at = time.monotonic()
        while not over.wait(max(0.0, next_at - time.monotonic())):
            next_at = max(next_at + LIST_PERIOD_S, time.monotonic())
            begin = time.perf_counter()
            found = len(stub.ListProcesses(pb.ListProcessesRequest(), timeout=10).processes)
            print(f"{(time.perf_counter() - begin) * 1e3:.3f} {found}", flush=True)
    return 0


@contextlib.contextmanager
def asking(daemon: Daemon, answers: list[Answer]) -> Iterator[None]:
    """Keeps a process of its own calling ListProcesses; its latencies in ms and sizes go to `answers`."""
    command = [sys.executable, __file__, "--ask", daemon.address]
    with subprocess.Popen(
        command, env=daemon.client_environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def collect() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                latency, found = line.split()
                answers.append(Answer(time.monotonic(), float(latency), int(found)))

        reader = threading.Thread(target=collect, name="latencies")
        reader.start()
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            reader.join(30)
    assert process.returncode == 0, "ListProcesses failed"


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least the given share of the values does not exceed."""
    return sorted(values)[max(0, -int(-len(values) * share // 1) - 1)]


def under_load(daemon: Daemon, pids: list[int], minutes: float) -> list[Goal]:
    """Makes captures and calls of ListProcesses for the given time."""
    captures = Captures(daemon, Plan(pids, busy=BUSY_AGENTS, period_s=60 / CAPTURES_A_MINUTE))
    captures.run(seconds=3 * 60 / CAPTURES_A_MINUTE)  # what is done once only is not growth
    before = settled_descriptors(daemon)
    captures.forget()
    answers: list[Answer] = []
    cpu, began = cpu_ns(daemon.pid), time.monotonic()
    with Sampler(daemon.pid) as sampler, asking(daemon, answers):
        captures.run(seconds=minutes * 60)
    took = time.monotonic() - began
    cpu = cpu_ns(daemon.pid) - cpu
    captures.check_again()
    after = settled_descriptors(daemon)
    latencies = [answer.latency_ms for answer in answers]
    slow = [answer.at for answer in answers if answer.latency_ms > P99_MS]
    at_full = sum(any(begin <= at <= end for begin, end in captures.of_all) for at in slow)
    print(f"{captures.started} captures of {captures.targets} targets in {took:.0f} s; {captures.records} records,")
    print(f"  {captures.fetched_bytes / MB:.0f} MB fetched; verdicts {dict(captures.verdicts)}, {captures.late} late")
    for problem in list(captures.problems)[:10]:
        print(f"  {problem}")
    return [
        Goal("captures or targets without a true verdict", captures.lost, 0),
        Goal("verdicts that are not DONE", sum(captures.verdicts.values()) - captures.verdicts["DONE"], 0),
        Goal("captures a minute", captures.started / took * 60),
        Goal("targets from the captures' creation to verdict, s, p50", percentile(captures.seconds, 0.5)),
        Goal("targets from the captures' creation to verdict, s, max", max(captures.seconds)),
        Goal(f"ListProcesses ({len(answers)} calls), ms, p50", percentile(latencies, 0.5)),
        Goal("ListProcesses, ms, p99", percentile(latencies, 0.99), P99_MS),
        Goal("ListProcesses, ms, max", max(latencies)),
        Goal(f"ListProcesses calls over {P99_MS:g} ms", len(slow)),
        Goal("  of these while all 64 were captured", at_full),
        Goal("ListProcesses answers without all agents", sum(answer.found != AGENTS for answer in answers), 0),
        Goal("daemon's CPU, % of a core", cpu / took / 1e7),
        Goal("daemon's peak RSS, MB", peak_rss_bytes(daemon.pid) / MB, RSS_BYTES / MB),
        Goal("daemon's RSS after it, MB", rss_bytes(daemon.pid) / MB),
        Goal("workers' and helpers' peak RSS together, MB", sampler.workers_rss_peak / MB),
        Goal("all of them, shared pages once (PSS), peak, MB", sampler.pss_peak / MB),
        Goal("more descriptors than before", after - before, 0),
    ]


def cpu_groups(stack: contextlib.ExitStack) -> tuple[CpuGroup, CpuGroup] | None:
    """Control groups of the daemon and of the programs; None if none can be made."""
    try:
        own = stack.enter_context(cpu_group(f"kinetod-load-{os.getpid()}"))
        own.limit(*CPU_QUOTA)
        return own, stack.enter_context(cpu_group(f"kinetod-load-programs-{os.getpid()}"))
    except OSError as exc:
        print(f"no control groups ({exc.strerror}): the programs compete with the daemon one by one")
        return None


def settled_descriptors(daemon: Daemon) -> int:
    """The daemon's open descriptors once their number has been stable for ten seconds, or the last number."""
    seen: Counter[int] = Counter()
    for _ in range(int(SETTLED_S)):
        count = len(open_files(daemon.pid))
        seen = Counter({count: seen[count] + 1})
        if seen[count] >= 10:
            break
        threading.Event().wait(1)
    return count


def idle(daemon: Daemon, seconds: float, name: str) -> list[Goal]:
    """Measures CPU time while nobody makes requests."""
    threading.Event().wait(10)  # what the last calls have left behind
    began, front, others = time.monotonic(), cpu_ns(daemon.pid), sum(map(cpu_ns, children(daemon.pid)))
    threading.Event().wait(seconds)
    took = time.monotonic() - began
    front, others = cpu_ns(daemon.pid) - front, sum(map(cpu_ns, children(daemon.pid))) - others
    return [
        Goal(f"idle CPU {name}, workers included, % of a core", (front + others) / took / 1e7, IDLE_PERCENT),
        Goal(f"idle CPU {name}, workers and helpers alone", others / took / 1e7),
    ]


def main() -> int:
    """Runs, prints, and returns the exit status: 0 if the goals were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of captures (default: 10)")
    parser.add_argument("--idle-s", type=float, default=60.0, help="of idleness, each time (default: 60)")
    parser.add_argument("--ask", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        return ask_steadily(arguments.ask)
    with contextlib.ExitStack() as stack:
        groups = cpu_groups(stack)
        started = time.monotonic()
        daemon = stack.enter_context(running_daemon(environ=ENVIRON))
        goals = [Goal("start until READY=1, s", time.monotonic() - started)]
        if groups is not None:
            groups[0].add([daemon.pid, *children(daemon.pid)])
        with agents(daemon) as pids:
            if groups is not None:
                groups[1].add(pids)
            goals += under_load(daemon, pids, arguments.minutes)
            goals += idle(daemon, arguments.idle_s, "with 64 agents")
        until(lambda: not ready_pids(daemon.stub()), "the agents are gone", CONNECTED_S)
        goals += idle(daemon, arguments.idle_s, "without agents")
        load = os.getloadavg()
        complaints = [line for line in daemon.log().splitlines() if "ERROR" in line or "Traceback" in line]
    goals.append(Goal("errors in the daemon's log", len(complaints), 0))
    print(*goals, *complaints[:10], sep="\n")
    print(f"load average at the end: {load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f}")
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
