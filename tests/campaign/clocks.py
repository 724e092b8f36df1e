"""Captures three hosts with different clocks at once, and checks the accuracy that the merged trace states.

    .venv/bin/python tests/campaign/clocks.py [--rounds 5]

Each host is a network namespace with a real daemon, which is called over TLS, and a real program whose clock is
minutes to hours off. The programs take their steps by a clock that all of them share (CLOCK_MONOTONIC), and record
when. In the merged trace, the steps of two programs must be as far apart as they really were, to within the
uncertainty that the file states. Exit status 1 if they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaign.parts.goals import Goal
from support.machine.namespaces import Namespace, NoNamespaces, namespaces
from support.machine.shifted_clock import ShiftedClock
from support.peers.certificates import Authority, write_server_files
from support.service.cli import environment, run_process
from support.service.daemon import Daemon
from support.targets.programs import ready_pids
from support.waiting import until

SHIFTS_S = (0, 7321, -123)
PORT = 50051
PERIOD_NS = 20_000_000
# Steps at every multiple of the period by CLOCK_MONOTONIC, and writes down between which two readings of it.
STEPPING = """
import sys, threading, time
import kineto_agent
kineto_agent.start()
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
period = int(sys.argv[1])
print("ready", flush=True)
with open(sys.argv[2], "w", buffering=1) as steps:
    while True:
        time.sleep((period - time.monotonic_ns() % period) / 1e9)
        before = time.monotonic_ns()
        kineto_agent.step()
        steps.write("%d %d\\n" % (before, time.monotonic_ns()))
"""
SETTINGS = """
[access]
tls_certificate = "{folder}/server.pem"
tls_key = "{folder}/server.key"
tls_client_ca = "{folder}/clients.pem"
[access.certificates]
"CN:operator" = "admin"
"""


class NamespacedDaemon(Daemon):
    """A daemon in a network namespace; its Unix socket can be reached from everywhere."""

    def __init__(self, root: Path, namespace: Namespace, options: Sequence[str], environ: Mapping[str, str]) -> None:
        super().__init__(root, options, environ=environ)
        self._namespace = namespace

    def command(self) -> list[str]:
        """Command that runs the daemon in the namespace."""
        return self._namespace.command(*super().command())


@dataclass(frozen=True)
class Host:
    """A daemon and a program with a rank. steps: the file in which the program records its steps."""

    address: str
    daemon: Daemon
    rank: int
    steps: Path

    def stepped(self) -> list[tuple[int, int]]:
        """Readings of the common clock before and after each step, in ns, by the step's number."""
        lines = self.steps.read_text().splitlines()
        return [(int(before), int(after)) for before, after in (line.split() for line in lines)]


@contextlib.contextmanager
def running_host(root: Path, namespace: Namespace, rank: int, authority: Authority) -> Iterator[Host]:
    """Runs a host with the clock of its rank."""
    root.mkdir()
    write_server_files(root, authority.issue(dns="localhost"), authority.certificate)
    (root / "config.toml").write_text(SETTINGS.format(folder=root))
    clock = ShiftedClock(root)
    clock.set_forward(SHIFTS_S[rank])
    address = f"{namespace.address}:{PORT}"
    options = ("--config", str(root / "config.toml"), "--listen", address, "--no-attach")
    daemon = NamespacedDaemon(root, namespace, options, clock.environ())
    daemon.start()
    steps = root / "steps"
    environ = {**daemon.client_environ(), "RANK": str(rank), "WORLD_SIZE": str(len(SHIFTS_S))}
    command = namespace.command(sys.executable, "-c", STEPPING, str(PERIOD_NS), str(steps))
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            until(lambda: ready_pids(daemon.stub()) == {program.pid}, "the agent is connected", state=daemon.log)
            yield Host(address, daemon, rank, steps)
            daemon.stop()
        finally:
            program.kill()
            daemon.kill()


def trace(hosts: Sequence[Host], authority: Authority, folder: Path) -> dict[str, Any]:
    """Records all hosts at once; returns what kinetoctl prints."""
    client = authority.issue("operator")
    names = {"KINETO_TLS_CA": authority.certificate, "KINETO_TLS_CERT": client.certificate}
    names |= {"KINETO_TLS_KEY": client.key}
    environ = environment(KINETO_TLS_NAME="localhost")
    for name, content in names.items():
        path = folder / f"{name}.pem"
        path.write_bytes(content)
        environ[name] = str(path)
    addresses = ",".join(host.address for host in hosts)
    options = ("--rank", "all", "--duration", "1s", "--format", "chrome-json", "--output-dir", str(folder))
    done = run_process(["--output", "json", "trace", "--hosts", addresses, *options], environ)
    if done.code != 0:
        logs = "".join(host.daemon.log() for host in hosts)
        raise SystemExit(f"exit code {done.code}\n{done.stdout}\n{done.stderr}\n{logs}")
    document: dict[str, Any] = done.json()
    return document


def errors_ns(hosts: Sequence[Host], merged: Mapping[str, Any]) -> dict[int, tuple[float, float]]:
    """Bounds by rank of how late its steps are in the merged trace, up to a constant common to all ranks."""
    ranks = {int(pid): each["rank"] for each in merged["kinetodMerge"]["ranks"] for pid in each["pids"]}
    taken = {host.rank: host.stepped() for host in hosts}
    bounds: dict[int, dict[int, tuple[float, float]]] = {host.rank: {} for host in hosts}
    for event in merged["traceEvents"]:
        name, rank = str(event.get("name")), ranks.get(event.get("pid"))
        if name.startswith("ProfilerStep#") and rank is not None and event.get("cat") == "user_annotation":
            number = int(name.partition("#")[2])
            before, after = taken[rank][number - 1]
            shown_ns = float(event["ts"]) * 1e3
            bounds[rank][number] = shown_ns - after, shown_ns - before
    for steps in bounds.values():
        del steps[min(steps)]  # it began before the window, where it is cut
    return {
        rank: (max(low for low, _ in steps.values()), min(high for _, high in steps.values()))
        for rank, steps in bounds.items()
    }


def judged(hosts: Sequence[Host], document: Mapping[str, Any]) -> list[Goal]:
    """Compares how far apart the ranks are in the merged trace with the uncertainty that the trace states."""
    merged = json.loads(Path(document["merged"]["path"]).read_bytes())
    found, about = errors_ns(hosts, merged), merged["kinetodMerge"]
    reference_low, reference_high = found[about["reference_rank"]]
    goals = []
    for rank, (low, high) in found.items():
        clock = next(each for each in about["ranks"] if each["rank"] == rank)
        wrong_ns = max(0.0, low - reference_high, reference_low - high)  # at least
        name = f"rank {rank}, clock {clock['clock_offset_ns'] / 1e9:+.6f} s: off by at least, us"
        goals.append(Goal(name, wrong_ns / 1e3, clock["clock_uncertainty_ns"] / 1e3))
    shifts_ns = {rank: shift_s * 10**9 for rank, shift_s in enumerate(SHIFTS_S)}
    largest_ns = max(abs(each["clock_offset_ns"] + shifts_ns[each["rank"]]) for each in about["ranks"])
    limit_us = about["clock_uncertainty_ns"] / 1e3
    goals.append(Goal("the largest error of a measured clock, us", largest_ns / 1e3, limit_us))
    goals.append(Goal("uncertainty that the file states, us", about["clock_uncertainty_ns"] / 1e3))
    goals.append(Goal("spread of the starts, by these clocks, us", document["start_spread_ns"] / 1e3))
    return goals


def main() -> int:
    """Runs, prints, and returns the exit status: 0 if every trace was as accurate as it stated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="captures (default: 5)")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("network namespaces are made by root: run this as root", file=sys.stderr)
        return 2
    met = True
    try:
        with contextlib.ExitStack() as stack:
            spaces = stack.enter_context(namespaces(len(SHIFTS_S)))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clocks-")))
            authority = Authority()
            hosts = [
                stack.enter_context(running_host(folder / f"host{rank}", space, rank, authority))
                for rank, space in enumerate(spaces)
            ]
            for number in range(arguments.rounds):
                output = folder / f"round{number}"
                output.mkdir()
                goals = judged(hosts, trace(hosts, authority, output))
                print(f"capture {number + 1}", *goals, sep="\n", flush=True)
                met = met and all(goal.met for goal in goals)
    except NoNamespaces as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
