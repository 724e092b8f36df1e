"""Proves the recording of AMD GPUs on a machine that has one, in some ten minutes; the report is one file.

    .venv/bin/python tests/rocm/prove.py [--fake [--version N]] [--output build/rocm-report.json]

`make rocm` runs it; `make rocm FAKE=1` runs it against the fake ROCm, which is its own test. A program of ours
(hip_program.py) launches kernels through HIP and logs what it did; kinetod records it, attached while it runs, and the
trace must say the same: how many kernels of which name, copies, calls, and times within those that the program read.
The report has what was found on this machine, each check with its figures, and all of it as text; send it whole.

The exit status is 0 if all checks passed. A check that could not be made is no failure; the report says why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kinetoctl.commands.run import ROCM_VARIABLE, rocm_tools
from rocm.gpu_counters import played_gpu, prove_counters
from support.counters.gpu_metrics_tables import PlayedAmdgpu
from support.rocm import fakes as rocm
from support.rocm.program import PROGRAM, RocmProgram, fake_environment
from support.service.cli import kinetoctl
from support.service.daemon import Daemon, running_daemon
from support.service.tracing import trace_around, trace_events

EVERYTHING = ("--activities", "kernel,gpu_memcpy,cuda_runtime")
SLACK_NS = 2_000_000  # how far a time may lie outside those that the program read
GROWTH_KIB = 4096  # of resident memory over all cycles but the first ones
SETTLING = 3  # cycles
PLACES = ("/opt/rocm/lib/libamdhip64.so", "/opt/rocm/lib64/libamdhip64.so")


@dataclass(frozen=True)
class Plan:
    """How much is done, and on what."""

    fake: bool
    version: int  # of the fake
    launches: int
    many: int
    cycles: int
    folder: Path


@dataclass
class Report:
    """What was found."""

    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, passed: bool | None, text: str, **figures: Any) -> None:
        """One check. passed: None: it could not be made."""
        self.checks.append({"check": name, "passed": passed, "text": text, **figures})
        mark = {True: "ok  ", False: "FAIL", None: "--  "}[passed]
        print(f"{mark} {name}: {text}", flush=True)

    @property
    def passed(self) -> bool:
        """Whether no check failed, and some passed."""
        return all(check["passed"] is not False for check in self.checks) and any(
            check["passed"] for check in self.checks
        )

    def write(self, path: Path) -> None:
        """The report as one file."""
        marks = {True: "ok", False: "FAIL", None: "not made"}
        text = [f"{key}: {value}" for key, value in self.facts.items()]
        text += [f"{marks[check['passed']]}: {check['check']}: {check['text']}" for check in self.checks]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"passed": self.passed, "facts": self.facts, "checks": self.checks, "text": text}, indent=1)
        )


# ------------------------------------------------------------ the program


def has_rocm_torch() -> bool:
    """Whether this interpreter has a torch for ROCm. Asked in another process: torch stays out of this one."""
    if importlib.util.find_spec("torch") is None:
        return False
    code = "import torch, sys; sys.exit(0 if torch.version.hip and torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def hip_arguments(plan: Plan) -> list[str]:
    """Which HIP the program uses: the fake one, else that of an installation."""
    if plan.fake:
        return ["--hip", str(rocm.installed(plan.folder / "rocm") / "libamdhip64.so.7"), "--fake"]
    places = [os.environ.get("HIP_LIBRARY", ""), *PLACES]
    found = [place for place in places if place and Path(place).exists()]
    if not found:
        raise SystemExit(f"no libamdhip64 at {' or '.join(PLACES)}: name one in HIP_LIBRARY, or use a torch for ROCm")
    return ["--hip", found[0]]


@contextmanager
def program(
    plan: Plan, daemon: Daemon, *arguments: str, environ: dict[str, str] | None = None
) -> Iterator[RocmProgram]:
    """The running program."""
    changed = {**daemon.client_environ(), **(environ or {})}
    if plan.fake:
        changed |= fake_environment(plan.folder / "rocm", version=plan.version)
    command = [sys.executable, str(PROGRAM), *arguments]
    if environ:
        command = kinetoctl("--quiet", "run", "--", *command)
    with subprocess.Popen(command, env=changed, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield RocmProgram(process)
        finally:
            process.kill()


# ------------------------------------------------------------ checks


def compare(report: Report, name: str, told: dict[str, Any] | None, target: Any, folder: Path) -> bool:
    """Whether the trace says what the program says."""
    if told is None:
        report.add(name, False, f"not recorded: {target['reason_code']}: {target['reason']}")
        return False
    rows = trace_events(folder)
    kernels = [row for row in rows if row.get("cat") == "kernel"]
    names = Counter(row["name"] for row in kernels)
    copies = sum(row.get("cat") == "gpu_memcpy" for row in rows)
    calls = {row["args"]["correlation"] for row in rows if row.get("cat") == "cuda_runtime"}
    joined = sum(row["args"]["correlation"] in calls for row in kernels)
    total = sum(told["kernels"].values())
    right = names == Counter(told["kernels"]) and joined == total
    report.add(
        name, right, f"{total} launched, {len(kernels)} recorded, {joined} joined with their launches; "
        f"{copies} copies of {told['copies']}", launched=told["kernels"], recorded=dict(names),
        warnings=target["warnings"], verdict=target["verdict"], counts=target.get("counts"),
    )  # fmt: skip
    check_times(report, name, told, kernels, target)
    return right


def check_times(report: Report, name: str, told: dict[str, Any], kernels: list[dict[str, Any]], target: Any) -> None:
    """Whether kernels lie within the times that the program read, and take time."""
    if not kernels:
        return
    base = int(target["summary"]["window_start_ns"])
    first = min(row["ts"] for row in kernels) * 1000
    last = max(row["ts"] + row["dur"] for row in kernels) * 1000
    within = last - first <= told["ended"] - told["began"] + SLACK_NS and base <= told["began"]
    by_stream: dict[int, list[dict[str, Any]]] = {}
    for row in kernels:
        by_stream.setdefault(row["args"]["stream"], []).append(row)
    overlaps = 0
    for own in by_stream.values():
        own.sort(key=lambda row: row["ts"])
        overlaps += sum(one["ts"] + one["dur"] > other["ts"] + 0.001 for one, other in zip(own, own[1:]))
    positive = sum(row["dur"] > 0 for row in kernels)
    report.add(
        f"{name}: times", within and positive == len(kernels),
        f"kernels span {(last - first) / 1e6:.1f} ms of the program's {(told['ended'] - told['began']) / 1e6:.1f} ms "
        f"on {len(by_stream)} streams, {overlaps} overlap on a stream, {len(kernels) - positive} take no time",
    )  # fmt: skip


def live(report: Report, plan: Plan, daemon: Daemon, arguments: list[str]) -> None:
    """A program that nobody prepared, traced many times while it runs."""
    with program(plan, daemon, *arguments) as running:
        report.facts["hip"] = running.ready["hip"]
        before = running.order(f"launch {plan.launches}")
        alone_us = (before["ended"] - before["began"]) / plan.launches / 1000
        folder = plan.folder / "live"
        target, told = trace_around(
            daemon, running.pid, folder, lambda: running.order(f"launch {plan.launches}"), *EVERYTHING
        )
        if not compare(report, "live attach", told, target, folder) and told is None:
            return
        assert told is not None
        recorded_us = (told["ended"] - told["began"]) / plan.launches / 1000
        report.add("cost of a launch", None, f"{alone_us:.2f} us before, {recorded_us:.2f} us while recorded")
        left = running.order("status")["variables"]
        report.add("environment", not left, f"variables of rocprofiler left behind: {left or 'none'}")
        many_folder = plan.folder / "many"
        target, told = trace_around(
            daemon, running.pid, many_folder, lambda: running.order(f"launch {plan.many}"),
            *EVERYTHING, "--buffer-limit", "512MiB",
        )  # fmt: skip
        compare(report, "many launches", told, target, many_folder)
        repeat(report, plan, daemon, running)
        after = running.order(f"launch {plan.launches}")
        report.add(
            "afterwards", None, f"a launch takes {(after['ended'] - after['began']) / plan.launches / 1000:.2f} us"
        )
        report.add("exit", running.end() == 0, f"the program's exit status is {running.process.returncode}")


def repeat(report: Report, plan: Plan, daemon: Daemon, running: RocmProgram) -> None:
    """Captures in a row: each whole, memory and descriptors flat."""
    states, wrong = [], 0
    for number in range(plan.cycles):
        folder = plan.folder / f"cycle{number}"
        _, told = trace_around(daemon, running.pid, folder, lambda: running.order("launch 1000"), *EVERYTHING)
        names = Counter(row["name"] for row in trace_events(folder) if row.get("cat") == "kernel") if told else {}
        wrong += told is None or names != Counter(told["kernels"])
        states.append(running.order("status"))
    settled = states[min(SETTLING, len(states) - 1)]
    growth = states[-1]["resident_kib"] - settled["resident_kib"]
    more = states[-1]["descriptors"] - settled["descriptors"]
    report.add(
        "captures in a row", not wrong and growth <= GROWTH_KIB and more <= 0,
        f"{plan.cycles}, {wrong} not whole; resident memory grew by {growth} KiB, descriptors by {more}",
        states=states,
    )  # fmt: skip


def prepared(report: Report, plan: Plan, daemon: Daemon, arguments: list[str]) -> None:
    """A program that `kinetoctl run` starts."""
    with program(plan, daemon, *arguments, environ={ROCM_VARIABLE: rocm_tools({})}) as running:
        folder = plan.folder / "prepared"
        target, told = trace_around(
            daemon, running.pid, folder, lambda: running.order(f"launch {plan.launches}"), *EVERYTHING
        )
        compare(report, "kinetoctl run", told, target, folder)


def beside(report: Report, plan: Plan, daemon: Daemon, arguments: list[str], order: str) -> None:
    """The program's own profiler records at the same time."""
    with program(plan, daemon, *arguments) as running:
        folder = plan.folder / "beside"
        target, told = trace_around(
            daemon, running.pid, folder, lambda: running.order(f"{order} {plan.launches}"), *EVERYTHING
        )
        if told is None:
            report.add("beside another profiler", None, f"not recorded: {target['reason_code']}: {target['reason']}")
            return
        compare(report, "beside another profiler", told, target, folder)
        total = sum(told["kernels"].values())
        report.add("the other profiler", told["seen"] == total, f"it has seen {told['seen']} of {total} kernels")


def counters(report: Report, plan: Plan, daemon: Daemon, arguments: list[str], played: PlayedAmdgpu | None) -> None:
    """The program runs, and its GPU's counters are sampled."""
    with program(plan, daemon, *arguments) as running:
        prove_counters(report, daemon, running, plan.launches, played)


def describe(report: Report, plan: Plan) -> None:
    """This machine."""
    report.facts |= {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "fake": f"rocprofiler-sdk {plan.version}" if plan.fake else "no",
    }
    for name, path in (("rocm", "/opt/rocm/.info/version"), ("driver", "/sys/module/amdgpu/version")):
        if Path(path).exists():
            report.facts[name] = Path(path).read_text().strip()


def prove(plan: Plan) -> Report:
    """All checks."""
    report = Report()
    describe(report, plan)
    torch = not plan.fake and has_rocm_torch()
    arguments = ["--torch"] if torch else hip_arguments(plan)
    with ExitStack() as stack:
        played = stack.enter_context(played_gpu()) if plan.fake else None
        daemon = stack.enter_context(running_daemon(environ=None if played is None else played.environ()))
        steps: list[tuple[str, Callable[[], None]]] = [
            ("live attach", lambda: live(report, plan, daemon, arguments)),
            ("kinetoctl run", lambda: prepared(report, plan, daemon, arguments)),
            ("counters", lambda: counters(report, plan, daemon, arguments, played)),
        ]
        if plan.fake:
            client = [*arguments, "--client", str(rocm.fake_kineto())]
            steps.append(("beside another profiler", lambda: beside(report, plan, daemon, client, "client")))
        elif torch:
            steps.append(("beside another profiler", lambda: beside(report, plan, daemon, arguments, "profiled")))
        else:
            report.add("beside another profiler", None, "there is no torch for ROCm here")
        for name, step in steps:
            try:
                step()
            except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as exc:
                report.add(name, False, f"it broke off: {type(exc).__name__}: {exc}"[:2000])
    return report


def main() -> int:
    """Prove, write the report, and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--version", type=int, default=10305, help="of the fake rocprofiler-sdk")
    parser.add_argument("--launches", type=int, default=20_000)
    parser.add_argument("--many", type=int, default=1_000_000)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("build/rocm-report.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kineto-rocm-") as folder:
        plan = Plan(options.fake, options.version, options.launches, options.many, options.cycles, Path(folder))
        report = prove(plan)
    report.write(options.output)
    print(f"{'all checks passed' if report.passed else 'NOT PROVEN'}; the report is {options.output}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
