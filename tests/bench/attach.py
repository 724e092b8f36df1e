"""Compares our attach with `memray attach`, gdb and hypno, on the same targets in one run.

    python tests/bench/attach.py [--count 20] [--rivals PYTHON] [--target KIND ...]

The tools take turns to bring a line of Python into the same kinds of target, each time into a healthy one. Printed,
in ms: latency, from the request until that line runs in the target; pause, by how much the target's own longest lap
exceeds its usual one; and failures, which include a target that was killed or hangs. Ours appears three times: a line
of Python like that of the others, handed over by a warm process; the agent by a warm helper, as in the daemon, where
the latency is the time until the channel is open, and the pause includes the arrival and departure of the whole
agent; and the agent by a helper that is started for each request, until the agent runs.

The rivals live in an environment of their own, .venv-rivals (made by `make bench-attach`), whose Python runs the
targets: `memray attach` needs memray in the target's environment.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "agent", "daemon", "protos")]

from campaign.attach_targets.control import LAPS  # noqa: E402
from campaign.parts.attach_harness import Ended, RunningTarget, version_of  # noqa: E402
from kinetod.attach.attach_types import AttachError, Bootstrap, Deadline  # noqa: E402
from kinetod.attach.methods.pending_call import PendingCall  # noqa: E402
from kinetod.attach.policy.preconditions import suitable_image  # noqa: E402
from support.targets.attachers import HelperAttacher  # noqa: E402
from support.waiting import until  # noqa: E402

PATIENCE_S = 10.0
SETTLE_LAPS = 200  # before the usual lap is measured
HEADER = ("target", "tool", "tries", "failed", "latency: median", "max", "pause: median", "max")


class Tool(Protocol):
    """One way to run a line of Python in a process."""

    name: str

    def attach(self, pid: int) -> float:
        """Attaches; returns the latency in ms once the tool has released the target. Raises Failed."""

    def close(self) -> None:
        """Ends the processes that were started."""


class Failed(Exception):
    """The line did not run."""


class OurLine:
    """The same line that the other tools bring in, run through the helper's own code in this process."""

    name = "kinetod, a line"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="attach-bench-")
        self._number = 0

    def attach(self, pid: int) -> float:
        self._number += 1
        file = Path(self._folder.name) / str(self._number)
        begin = time.perf_counter_ns()
        deadline = Deadline(PATIENCE_S)
        try:
            PendingCall().hand_over(suitable_image(pid), Bootstrap(1, _line(file).encode()), deadline)
        except AttachError as exc:
            raise Failed(exc.reason) from None
        return _since(begin, file)

    def close(self) -> None:
        self._folder.cleanup()


class Ours:
    """The agent, by a warm helper or by one that is started for each request."""

    def __init__(self, *, warm: bool) -> None:
        self.name = "kinetod, agent" if warm else "kinetod, agent, cold helper"
        self._attacher = HelperAttacher(wait_for_leave=True) if warm else None

    def attach(self, pid: int) -> float:
        begin = time.perf_counter_ns()
        attacher = self._attacher or HelperAttacher(wait_for_leave=True)
        started_ns = 0 if self._attacher else time.perf_counter_ns() - begin
        try:
            attempt = attacher.attach(pid)
        finally:
            if self._attacher is None:
                attacher.close()
        if attempt.outcome != "success":
            raise Failed(attempt.reason)
        if self._attacher is None:  # the helper's own clock begins when it has started: until the agent runs, then
            return (started_ns + attempt.agent_ns) / 1e6
        return attempt.latency_ns / 1e6

    def close(self) -> None:
        if self._attacher:
            self._attacher.close()


class Command:
    """A command whose line of Python writes the time to a file, which is polled."""

    def __init__(self, name: str, command: Callable[[int, str], list[str | Path]]) -> None:
        self.name = name
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="attach-bench-")
        self._number = 0

    def attach(self, pid: int) -> float:
        self._number += 1
        file = Path(self._folder.name) / str(self._number)
        begin = time.perf_counter_ns()
        _run(self._command(pid, _line(file)))
        return _since(begin, file)

    def close(self) -> None:
        self._folder.cleanup()


def _line(file: Path) -> str:
    return f"import time; n = time.perf_counter_ns(); f = open('{file}', 'w'); f.write(str(n)); f.close()"


def _since(begin_ns: int, file: Path) -> float:
    """Time until the line ran, in ms. Raises Failed."""
    try:
        until(lambda: file.exists() and file.read_text(), "the line has run", 2)
    except AssertionError:
        raise Failed("the line did not run") from None
    return (int(file.read_text()) - begin_ns) / 1e6


class Memray:
    """Tracks allocations for the shortest time; memray's file exists once its code runs in the target."""

    name = "memray attach"

    def __init__(self, python: Path) -> None:
        self._python = python
        self._folder = tempfile.TemporaryDirectory(prefix="attach-bench-")
        self._number = 0

    def attach(self, pid: int) -> float:
        self._number += 1
        file = Path(self._folder.name) / str(self._number)
        begin = time.perf_counter_ns()
        command: list[str | Path] = [self._python, "-m", "memray", "attach", "--method", "gdb", "-o", file, str(pid)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                until(lambda: file.exists() or process.poll() is not None, "its file is there", PATIENCE_S)
                latency_ms = (time.perf_counter_ns() - begin) / 1e6
                process.wait(PATIENCE_S)
            except (AssertionError, subprocess.TimeoutExpired):
                process.kill()
                _end_debuggers(pid)
                raise Failed("stuck") from None
        if not file.exists():
            raise Failed(f"exit status {process.returncode}")
        return latency_ms

    def let_go(self, pid: int) -> None:
        """Ends the tracking; not part of what is measured."""
        _run([self._python, "-m", "memray", "detach", "--method", "gdb", str(pid)])

    def close(self) -> None:
        self._folder.cleanup()


def _gdb(pid: int, line: str) -> list[str | Path]:
    quoted = line.replace("\\", "\\\\").replace('"', '\\"')
    calls = [
        "set $state = ((int (*)(void))PyGILState_Ensure)()",
        f'call ((int (*)(char *))PyRun_SimpleString)("{quoted}")',
        "call ((void (*)(int))PyGILState_Release)($state)",
    ]
    return ["gdb", "-nx", "-batch", "-p", str(pid), *(part for call in calls for part in ("-ex", call))]


def _hypno(python: Path) -> Callable[[int, str], list[str | Path]]:
    return lambda pid, line: [python, "-m", "hypno", str(pid), line]


def _run(command: list[str | Path]) -> None:
    """Runs the command. Raises Failed."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Failed("stuck") from None
        if process.returncode:
            errors.seek(0)
            raise Failed(f"exit status {process.returncode}: {errors.read()[-200:]!r}")


def _end_debuggers(pid: int) -> None:
    """Ends the gdb that a killed memray has left: only the tracer of this target."""
    status = Path(f"/proc/{pid}/status").read_text()
    tracer = int(status.partition("TracerPid:")[2].split()[0])
    if tracer:
        os.kill(tracer, signal.SIGKILL)


@dataclass(slots=True)
class Result:
    """Result of one tool on one kind of target, in ms."""

    kind: str
    tool: str
    latencies: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Cells of the table."""
        tries = len(self.latencies) + len(self.failures)
        times = [f"{value:.1f}" if value is not None else "" for value in (*_of(self.latencies), *_of(self.pauses))]
        return [self.kind, self.tool, str(tries), str(len(self.failures)), *times]


def _of(values: list[float]) -> tuple[float | None, float | None]:
    return (median(values), max(values)) if values else (None, None)


def measure(tool: Tool, kind: str, count: int, python: Path) -> Result:
    """Makes the given number of attaches; replaces a target that was harmed."""
    result = Result(kind, tool.name)
    while len(result.latencies) + len(result.failures) < count:
        with RunningTarget(kind, python) as target:
            target.wait_ready()
            for _ in range(count - len(result.latencies) - len(result.failures)):
                try:
                    usual_ms = _usual_lap_ms(target)
                except (Ended, AssertionError) as exc:  # what the attach before this one has done, or its detach
                    result.failures.append(f"the target was harmed: {exc}")
                    break
                target.take_longest_ns()
                laps = target.words[LAPS]
                try:
                    latency = tool.attach(target.pid)
                    until(lambda since=laps: target.words[LAPS] > since + 2, "it goes on", PATIENCE_S)  # type: ignore[misc]
                except (Failed, AssertionError) as exc:
                    result.failures.append(str(exc))
                    break
                result.latencies.append(latency)
                result.pauses.append(max(0.0, target.take_longest_ns() / 1e6 - usual_ms))
                if isinstance(tool, Memray):
                    with contextlib.suppress(Failed):
                        tool.let_go(target.pid)
    return result


def _usual_lap_ms(target: RunningTarget) -> float:
    """Mean lap over a short time, in ms."""
    laps, begin = target.words[LAPS], time.perf_counter()
    until(lambda: target.words[LAPS] > laps + SETTLE_LAPS or target.process.poll() is not None, "it settles")
    if target.process.poll() is not None:
        raise Ended("lost", "between two attaches")
    return (time.perf_counter() - begin) * 1e3 / (target.words[LAPS] - laps)


def tools(rivals: Path | None) -> Iterator[Callable[[], Tool]]:
    """The tools, in the order of their turns."""
    yield OurLine
    yield lambda: Ours(warm=True)
    yield lambda: Ours(warm=False)
    yield lambda: Command("gdb PyRun_SimpleString", _gdb)
    if rivals is not None:
        yield lambda: Memray(rivals)
        yield lambda: Command("hypno", _hypno(rivals))


def report(results: list[Result]) -> None:
    """Prints what failed, and the ratios to ours."""
    for result in results:
        for failure in sorted(set(result.failures)):
            print(f"{result.kind}, {result.tool}: {result.failures.count(failure)} x {failure}")
    for kind in dict.fromkeys(result.kind for result in results):
        ours = next(result for result in results if result.kind == kind)
        for result in results:
            if result.kind == kind and result is not ours and result.latencies and ours.latencies:
                latency = median(result.latencies) / median(ours.latencies)
                pause = median(result.pauses) / max(median(ours.pauses), 0.01)
                print(f"{kind}: {result.tool} / ours: latency {latency:.0f}, pause {pause:.0f}")


def main() -> None:
    """Runs the benchmark. Raises SystemExit if the rivals' Python is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--rivals", type=Path, default=ROOT / ".venv-rivals" / "bin" / "python")
    parser.add_argument("--target", action="append")
    options = parser.parse_args()
    rivals = options.rivals if options.rivals.exists() else None
    python = rivals or Path(sys.executable)
    print(f"Python {version_of(python)}, {options.count} attaches each" + ("" if rivals else "; without memray, hypno"))
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    results = []
    for kind in options.target or ["python", "malloc"]:
        for make in tools(rivals):
            tool = make()
            try:
                results.append(measure(tool, kind, options.count, python))
                print("| " + " | ".join(results[-1].cells()) + " |", flush=True)
            finally:
                tool.close()
    report(results)


if __name__ == "__main__":
    main()
