"""Captures a simulated fleet of 256 hosts with 8 processes each, first all fine, then with 5 % of the hosts broken.

    .venv/bin/python tests/campaign/fleet.py [--hosts 256] [--agents 8] [--only fine|broken]

The daemons are real ones without live attach, several to a process, each with its own socket, store and agents; the
agents are simulated, with the real session and the real link. The clocks of some hosts are an hour ahead or behind.
The client is `kinetoctl trace` in a process of its own. Its report is compared with what each daemon reports, and
with the true time of every window. Exit status 1 if a goal is missed.

Some broken hosts have no daemon (no socket, nobody listening, nobody answering), some make or start captures only
after the client has given up, and some have a clock that jumps or is not the one by which they start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
from campaign.parts.fleet import (
    ABSENT,
    FAR,
    FINE,
    LATE,
    REFUSING,
    SILENT,
    SLOW,
    UNSTEADY,
    Fleet,
    FleetHost,
    running_fleet,
)
from campaign.parts.goals import Goal
from google.protobuf import json_format
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.usage import peak_rss_bytes
from support.service.cli import environment, kinetoctl
from support.service.daemon import watch_to_end

HOSTS, AGENTS = 256, 8
BROKEN_SHARE = 0.05
BROKEN_KINDS = (ABSENT, SLOW, UNSTEADY, REFUSING, FAR, SILENT, LATE)
SHIFTS_S = (0, 3600, 0, -3600)
DURATION = "1s"
WARMUP = "2s"  # thousands of simulated agents share the cores of this machine when they start to record
CLIENT_S = 900.0
LATE_S = 120.0  # for a daemon that is behind the client
SPREAD_NS, FAN_OUT_S, RSS_BYTES = 5_000_000, 5.0, 300e6
SECOND_NS = 10**9
MB = 1e6


@dataclass(frozen=True)
class Client:
    """One `kinetoctl trace` and its results. began_ns, took_s: of the client's process."""

    document: dict[str, Any]
    exit_code: int
    began_ns: int
    took_s: float
    rss_bytes: int
    said: str


@dataclass(frozen=True)
class Begin:
    """When the window of one process began by the machine's time, and when its daemon was told to begin.

    clock_error_ns, uncertainty_ns: of the clock by which it was told.
    """

    window_ns: int
    told_ns: int
    clock_error_ns: int
    uncertainty_ns: int


def trace(fleet: Fleet, folder: Path) -> Client:
    """Records all processes of all hosts at once; the traces stay on their hosts."""
    where = ("--hosts", f"@{fleet.hosts_file()}", "--rank", "all")
    command = kinetoctl("--output", "json", "trace", *where, "--duration", DURATION, "--warmup", WARMUP, "--no-fetch")
    began_ns, begin, rss = time.time_ns(), time.monotonic(), 0
    with (folder / "client.json").open("w+b") as out, (folder / "client.log").open("w+b") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, cwd=folder, env=environment())
        while process.poll() is None:
            rss = max(rss, peak_rss_bytes(process.pid))
            if time.monotonic() - begin > CLIENT_S:
                process.kill()
            time.sleep(0.02)
        out.seek(0)
        errors.seek(0)
        text, said = out.read(), errors.read().decode()
    if not text:
        raise SystemExit(f"kinetoctl ended with exit code {process.returncode} and said no more than:\n{said}")
    return Client(json.loads(text), process.returncode, began_ns, time.monotonic() - begin, rss, said)


def captures_of(host: FleetHost, label: str) -> list[pb.Capture]:
    """What the host's own daemon reports of the client's capture, once the capture has ended there."""
    with grpc.insecure_channel(host.address) as channel:
        stub = ProfilerStub(channel)
        request = pb.ListCapturesRequest(labels={"kineto.fleet": label})
        return [
            watch_to_end(stub, capture.id, LATE_S) for capture in stub.ListCaptures(request, timeout=LATE_S).captures
        ]


def verdicts_of(targets: Sequence[pb.Target]) -> dict[int, tuple[str, str]]:
    """Verdict and reason code by pid."""
    return {target.pid: (pb.Verdict.Name(target.verdict), target.reason_code) for target in targets}


def compared(fleet: Fleet, client: Client) -> tuple[Counter[str], list[Begin], list[str]]:
    """Verdicts of hosts that are fine, how they began, and what the client reported wrongly."""
    verdicts: Counter[str] = Counter()
    begins, problems = list[Begin](), list[str]()
    told = {entry["host"]: entry for entry in client.document["hosts"]}
    for host in fleet.hosts:
        entry = told[host.name]
        if host.kind != FINE:
            if not said_of(entry):
                problems.append(f"{host.name} is {host.kind}, and the client has not noticed")
            continue
        if entry["error"] or entry["capture"] is None:
            problems.append(f"{host.name} is fine, and the client says: {entry['error']}")
            continue
        capture = json_format.ParseDict(entry["capture"], pb.Capture(), ignore_unknown_fields=True)
        stored = [verdicts_of(each.targets) for each in captures_of(host, client.document["id"])]
        if stored != [verdicts_of(capture.targets)]:
            problems.append(f"{host.name}: the client says {verdicts_of(capture.targets)}, the daemon {stored}")
        verdicts.update(pb.Verdict.Name(target.verdict) for target in capture.targets)
        problems += [f"{host.name} {each.pid}: {each.reason}" for each in capture.targets if each.reason]
        shift_ns = host.shift_s * SECOND_NS
        for target in capture.targets:
            begin_ns = target.summary.window_start_ns
            error_ns = abs(capture.clock.offset_ns + shift_ns)
            told_ns = target.requested_ns - shift_ns
            begins.append(Begin(begin_ns - shift_ns, told_ns, error_ns, capture.clock.uncertainty_ns))
    return verdicts, begins, problems


def measured(fleet: Fleet, agents: int, client: Client) -> tuple[list[Goal], list[str]]:
    """The figures of one run, and the problems found."""
    verdicts, begins, problems = compared(fleet, client)
    fine = [host for host in fleet.hosts if host.kind == FINE]
    fan_out_s = FAN_OUT_S if len(fine) == len(fleet.hosts) else None
    uncertainty_ns = max((begin.uncertainty_ns for begin in begins), default=0)
    beyond_ns = max((begin.clock_error_ns - begin.uncertainty_ns for begin in begins), default=0)
    last_told_ns = max((begin.told_ns for begin in begins), default=0)
    told_ns = last_told_ns - client.began_ns
    goals = [
        Goal(f"processes without a true verdict of {len(fine) * agents}", len(fine) * agents - verdicts.total(), 0),
        Goal("verdicts that are not DONE", verdicts.total() - verdicts["VERDICT_DONE"], 0),
        Goal("what the client says and is not so", len(problems), 0),
        Goal("spread of the true starts, ms", spread_ns(begins) / 1e6, (SPREAD_NS + uncertainty_ns) / 1e6),
        Goal("  as the client says, ms", (client.document["start_spread_ns"] or 0) / 1e6),
        Goal("uncertainty of the clocks at the start, ms", uncertainty_ns / 1e6),
        Goal("  by how much the worst clock is farther off, ms", beyond_ns / 1e6, 0),
        Goal("from the client's start until the last host is told, s", told_ns / 1e9, fan_out_s),
        Goal("  until the start from then on, s", (client.document["start_time_ns"] - last_told_ns) / 1e9),
        Goal("until the client has ended, s", client.took_s),
        Goal("the client's peak RSS, MB", client.rss_bytes / MB, RSS_BYTES / MB),
        Goal("the client's exit code", client.exit_code),
    ]
    return goals, problems


def spread_ns(begins: Sequence[Begin]) -> int:
    """Time between the beginnings of the first and the last window, in ns."""
    times = [begin.window_ns for begin in begins]
    return max(times) - min(times) if times else 0


def broken_hosts(hosts: int) -> dict[int, str]:
    """Broken hosts of every kind, evenly spread."""
    count = max(len(BROKEN_KINDS), round(hosts * BROKEN_SHARE))
    return {number * hosts // count: BROKEN_KINDS[number % len(BROKEN_KINDS)] for number in range(count)}


def run(hosts: int, agents: int, broken: Mapping[int, str], within: Path | None) -> bool:
    """Runs one fleet and one capture; returns whether the goals were met."""
    begin = time.monotonic()
    with (
        running_fleet(hosts, agents=agents, broken=broken, shifts_s=SHIFTS_S, within=within) as fleet,
        tempfile.TemporaryDirectory(prefix="fleet-client-") as folder,
    ):
        kinds = Counter(host.kind for host in fleet.hosts)
        print(f"{hosts} hosts with {agents} processes each, {dict(kinds)}: up after {time.monotonic() - begin:.0f} s")
        client = trace(fleet, Path(folder))
        goals, problems = measured(fleet, agents, client)
        complaints = [line for line in fleet.log().splitlines() if " ERROR " in line or "Traceback" in line]
    goals.append(Goal("errors in the daemons' logs", len(complaints), 0))
    for entry in client.document["hosts"]:
        if said := said_of(entry):
            print(f"  {entry['host']:<10} {broken_kind(entry['host'], broken):<9} {said}")
    print(*goals, *problems[:10], *complaints[:10], sep="\n", flush=True)
    return all(goal.met for goal in goals)


def said_of(entry: Mapping[str, Any]) -> str:
    """What the client reports as wrong with a host, or with all of its processes; empty for nothing."""
    targets = entry["capture"]["targets"] if entry["capture"] is not None else []
    reasons = {target["reason"] for target in targets}
    return str(entry["error"] or ("" if "" in reasons else "; ".join(sorted(reasons))))


def broken_kind(name: str, broken: Mapping[int, str]) -> str:
    """Kind of fault with which the host of this name was made."""
    return broken.get(int(name.removeprefix("node")), FINE)


def main() -> int:
    """Runs, prints, and returns the exit status: 0 if the goals were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=HOSTS, help=f"default: {HOSTS}")
    parser.add_argument("--agents", type=int, default=AGENTS, help=f"on each host (default: {AGENTS})")
    parser.add_argument("--only", choices=("fine", "broken"), help="one of the two runs")
    parser.add_argument("--within", type=Path, help="folder for the files of the hosts, with a short path")
    arguments = parser.parse_args()
    fleets = {"fine": {}, "broken": broken_hosts(arguments.hosts)}
    met = [
        run(arguments.hosts, arguments.agents, broken, arguments.within)
        for name, broken in fleets.items()
        if arguments.only in (None, name)
    ]
    load = os.getloadavg()
    print(f"load average at the end: {load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
