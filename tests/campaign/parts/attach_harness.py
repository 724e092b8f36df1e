"""Starts targets that check themselves, attaches to them, and counts the outcomes of attaches and targets.

Theory of operation
    An Attacher makes one attach and reports its outcome. A RunningTarget is one process of campaign.attach_targets and
    the page that it shares with us, which shows that it is ready, makes progress, and ends when told. `campaign`
    combines the two; tables and assertions are made from its Row.
    success   code of ours ran in the target
    refused   an AttachError that says why, and the target goes on
    failed    anything else that was said
    hung      the target did not go on within HANG_S, or did not end when told
    lost      the target ended by itself
    wrong     the target found something changed, or wrote to standard error
"""

import contextlib
import mmap
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from json import JSONDecodeError, loads
from pathlib import Path
from statistics import median
from typing import Protocol

from campaign.attach_targets.control import EXIT_AT, LAPS, PAGE_BYTES, PAGE_VARIABLE, READY, STOP, longest_gap_ns
from campaign.attach_targets.machine import LIBRARY
from support.agent.python_child import environment
from support.waiting import scaled, until

TESTS = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")  # a page there waits for no disk
MACHINE_C = TESTS / "campaign" / "attach_targets" / "machine.c"
HANG_S = 20.0
DEADLINE_S = 10.0
MOST_PAUSE_S = 0.03  # between two attaches, at random, so that they hit every point of a lap
OUTCOMES = ("success", "refused", "failed", "hung", "lost", "wrong")
NO_HELLO = "no Hello on the channel"
NO_HARM = ("success", "refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attach. Times in ns: from the request until our code ran, and until the agent ran; and for how long a
    thread was stopped.
    """

    outcome: str
    method: str = ""
    latency_ns: int = 0
    agent_ns: int = 0
    stopped_ns: int = 0
    reason: str = ""


class Attacher(Protocol):
    """One way to attach."""

    name: str

    def attach(self, pid: int) -> Attempt:
        """Attaches once, and detaches if the attacher can."""

    def close(self) -> None:
        """Ends the processes that the attacher has started."""


class Ended(Exception):
    """The target ended by itself, or does not end. `outcome` is lost or hung."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class RunningTarget:
    """One target process, as a context manager that kills the process if it is still there at the end."""

    def __init__(
        self,
        kind: str,
        python: str | Path = sys.executable,
        *,
        module: str = "",
        laps: int = 0,
        arguments: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> None:
        """module: instead of a kind's own, arguments: for it. command: any program; PAGE_VARIABLE names its page."""
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="attach-", dir=MEMORY if MEMORY.is_dir() else None)
        folder = Path(self._folder.name)
        page = folder / "page"
        with page.open("w+b") as file:
            file.truncate(PAGE_BYTES)
            self._map = mmap.mmap(file.fileno(), PAGE_BYTES)
        self.words = memoryview(self._map).cast("Q")
        self._errors = folder / "errors"
        variables = {"PYTHONPATH": str(TESTS), "PYTHONDONTWRITEBYTECODE": "1"}
        library = machine_library()
        if library is not None:
            variables[LIBRARY] = str(library)
        run = ["campaign.attach_targets." + module] if module else ["campaign.attach_targets", kind]
        made = [str(python), "-m", *run, str(page), *([str(laps)] if laps else []), *arguments]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command or made,
                env={**os.environ, PAGE_VARIABLE: str(page)} if command else environment(**variables),
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._last = (0, time.monotonic())
        self._taken_ns = 0
        self.result = ""  # what it is to be compared by, once finished

    def __enter__(self) -> "RunningTarget":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()  # a child of the target may have it, and live on
        self.process.wait()
        self.words.release()
        self._map.close()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Pid of the target."""
        return self.process.pid

    def wait_ready(self) -> None:
        """Waits until the target may be attached to. Raises Ended."""
        until(lambda: self.words[READY] or self.process.poll() is not None, f"{self.kind} is ready", 120)
        self._last = (self.words[LAPS], time.monotonic())
        self.check()

    def check(self) -> None:
        """Raises Ended unless the target is alive and makes progress."""
        if self.process.poll() is not None:
            raise Ended("lost", f"it ended with status {self.process.returncode}: {self.errors()[-500:]}")
        laps, since = self._last
        if self.words[LAPS] != laps or self.kind.startswith("for_good"):
            self._last = (self.words[LAPS], time.monotonic())
        elif time.monotonic() - since > scaled(HANG_S):
            raise Ended("hung", f"no lap in {HANG_S:g} s")

    def take_longest_ns(self) -> int:
        """The longest lap since the last call, in ns."""
        begin, self._taken_ns = self._taken_ns, time.monotonic_ns()
        return longest_gap_ns(self.words, begin, self._taken_ns)

    def longest_ms(self, begin_ns: int, end_ns: int) -> float:
        """The longest gap between two laps in a window of CLOCK_MONOTONIC, in ms."""
        return longest_gap_ns(self.words, begin_ns, end_ns) / 1e6

    def held(self) -> tuple[int, int]:
        """Number of the target's threads and of its descriptors."""
        proc = Path(f"/proc/{self.pid}")
        return len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir()))

    def errors(self) -> str:
        """What the target has written to standard error."""
        return self._errors.read_text("utf-8", "replace")

    def end(self, within_s: float = 0.0) -> tuple[int, bytes]:
        """Tells the target to end. Returns its exit status and output. Raises Ended. within_s: 0: HANG_S."""
        if self.kind.startswith("for_good"):  # by the signal alone: after its only lap nothing would catch it
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)
        else:
            self.words[STOP] = 1
        try:
            output, _ = self.process.communicate(timeout=scaled(within_s or HANG_S))
        except subprocess.TimeoutExpired:
            raise Ended("hung", f"it did not end within {within_s or HANG_S:g} s") from None
        return self.process.returncode, output

    def finish(self) -> list[str]:
        """Ends the target. Returns what it found wrong. Raises Ended."""
        self.check()
        return self._judge(*self.end())

    def report(self) -> list[str]:
        """Does what finish does, for a target that has ended after its laps."""
        output, _ = self.process.communicate(timeout=scaled(HANG_S))
        return self._judge(self.process.returncode, output)

    def _judge(self, status: int, output: bytes) -> list[str]:
        if status:
            raise Ended("lost", f"it ended with status {status}: {self.errors()[-500:]}")
        try:
            report = loads(output)
        except JSONDecodeError:
            return [f"its report is {output[-200:]!r}"]
        self.result = report["result"]
        wrong = list(report["wrong"]) + [""] * (report["wrong_count"] - len(report["wrong"]))
        return wrong + ([f"it wrote: {self.errors()[:500]}"] if self.errors() else [])


@dataclass(slots=True)
class Row:
    """Outcomes of the attaches to one kind of target."""

    kind: str
    python: str
    attacher: str
    attempts: list[Attempt] = field(default_factory=list)
    ends: list[Attempt] = field(default_factory=list)  # of the target: hung, lost, wrong
    longest_ns: int = 0  # lap
    left: str = ""  # behind in the target

    def count(self, outcome: str) -> int:
        """Number of attempts, and of ends of the target, with this outcome."""
        return sum(attempt.outcome == outcome for attempt in (*self.attempts, *self.ends))

    @property
    def harmless(self) -> bool:
        """Whether no target was hurt and every refusal had its reason."""
        return all(attempt.outcome in NO_HARM for attempt in (*self.attempts, *self.ends))

    @property
    def untouched(self) -> bool:
        """Whether no target was hurt; attaches may have failed."""
        return not self.ends and not self.left

    def reasons(self) -> list[str]:
        """Why attempts did not succeed, most frequent first."""
        found = Counter(f"{a.outcome}: {a.reason}" for a in (*self.attempts, *self.ends) if a.outcome != "success")
        return [f"{count} x {reason}" for reason, count in found.most_common()]

    def cells(self) -> list[str]:
        """Cells of the row in the table of results."""
        good = [attempt for attempt in self.attempts if attempt.outcome == "success"]
        methods = Counter(attempt.method for attempt in good)
        stops = [attempt.stopped_ns for attempt in good if attempt.stopped_ns]
        return [
            *(self.kind, self.python, self.attacher, str(len(self.attempts))),
            *(str(self.count(outcome) or "") for outcome in OUTCOMES),
            *(_ms([attempt.latency_ns for attempt in good]), _ms([attempt.agent_ns for attempt in good]), _ms(stops)),
            *(" ".join(f"{name} {count}" for name, count in methods.most_common()), self.left),
        ]


HEADER = (
    *("target", "Python", "by", "tries", *OUTCOMES, "latency ms: median / max", "agent ms: median / max"),
    *("stop ms: median / max", "method"),
)


def _ms(times: Sequence[int]) -> str:
    return f"{median(times) / 1e6:.2f} / {max(times) / 1e6:.1f}" if times else ""


def table(rows: Sequence[Row]) -> str:
    """The results as a Markdown table, then the reasons of attempts that did not succeed."""
    lines = ["| " + " | ".join((*HEADER, "left")) + " |", "|" + "---|" * (len(HEADER) + 1)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    for row in rows:
        lines += [f"{row.kind}, {row.python}, {row.attacher}: {reason}" for reason in row.reasons()[:8]]
    return "\n".join(lines)


def campaign(
    kind: str, attacher: Attacher, count: int, python: str | Path = sys.executable, *, seed: int | None = None
) -> Row:
    """Makes the given number of attaches to one target of this kind. A lost target is replaced."""
    chance = random.Random(seed)
    row = Row(kind, version_of(python), attacher.name)
    pause = _pauser(chance)
    while len(row.attempts) < count:
        with RunningTarget(kind, python) as target:
            try:
                target.wait_ready()
                held = target.held()
                target.take_longest_ns()
                while len(row.attempts) < count:
                    row.attempts.append(attacher.attach(target.pid))
                    target.check()
                    pause()
                row.longest_ns = max(row.longest_ns, target.take_longest_ns())
                if kind in STEADY:
                    row.left = _left(target, held)
                row.ends += [Attempt(outcome="wrong", reason=wrong) for wrong in target.finish()]
            except Ended as exc:
                row.ends.append(Attempt(outcome=exc.outcome, reason=exc.reason))
                if not row.attempts or len(row.ends) > 5:
                    return row
    return row


STEADY = (
    *("python", "malloc", "threads", "asleep_sleep", "asleep_poll", "for_good_sleep", "for_good_recv"),
    *("eventlet", "gevent", "replaced", "shadowed", "at_the_limit", "monitoring"),
    *("veto_compile", "veto_exec", "veto_import"),
)


def _left(target: RunningTarget, held: tuple[int, int]) -> str:
    with contextlib.suppress(AssertionError):
        until(lambda: target.held() == held, "the agent has left", 15)
        return ""
    threads, descriptors = target.held()
    return f"{threads - held[0]:+d} threads {descriptors - held[1]:+d} descriptors"


def _pauser(chance: random.Random) -> Callable[[], None]:
    """Waits that only serve to last a random time."""
    return lambda: time.sleep(chance.uniform(0, MOST_PAUSE_S))


def edges(when: str, attacher: Attacher, count: int, python: str | Path = sys.executable, *, most_s: float) -> Row:
    """Makes one attach to each of several processes at a random moment within `most_s` after their start, or end."""
    from campaign.attach_targets.edges import OUTPUT, STATUS

    chance = random.Random()
    row = Row(when, version_of(python), attacher.name)
    for _ in range(count):
        with RunningTarget("edges", python, module="edges") as target:
            try:
                if when == "at_exit":
                    target.wait_ready()
                    target.words[STOP] = 1
                    until(lambda t=target: t.words[EXIT_AT] or t.process.poll() is not None, "it ends")  # type: ignore[misc]
                time.sleep(chance.uniform(0, most_s))
                attempt = attacher.attach(target.pid)
                if when == "at_exit" and attempt.reason.startswith(NO_HELLO):
                    attempt = replace(attempt, outcome="refused")  # its channel ended as it did
                row.attempts.append(attempt)
                found = target.end()
                if found != (STATUS, OUTPUT) or target.errors():
                    reason = f"its end was {found} {target.errors()[-300:]}"
                    row.ends.append(Attempt(outcome="lost" if found[0] < 0 else "wrong", reason=reason))
            except Ended as exc:
                row.ends.append(Attempt(outcome=exc.outcome, reason=exc.reason))
    return row


_versions: dict[str, str] = {}


def version_of(python: str | Path) -> str:
    """Version of an interpreter, such as 3.11.7."""
    if str(python) not in _versions:
        command = [python, "-c", "import platform; print(platform.python_version())"]
        _versions[str(python)] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return _versions[str(python)]


def pythons() -> Iterator[Path]:
    """Every CPython on this machine from the agent's lowest supported version on, one of each kind."""
    from support.machine import newer_pythons

    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(9, 20):
        yield from sorted(root.glob(f"3.{minor}.*/bin/python"))
    debian = Path("/usr/bin/python3")
    if debian.exists():
        yield debian
    for version in newer_pythons.VERSIONS:
        found = newer_pythons.find(version)
        if found is not None:
            yield found


def machine_library() -> Path | None:
    """Path of machine.c, compiled; None if it cannot be compiled."""
    global _library
    if _library is None and platform.machine() == "x86_64" and shutil.which("cc"):
        folder = TESTS.parent / "build" / "attach-targets"
        folder.mkdir(parents=True, exist_ok=True)
        made, new = folder / "machine.so", folder / f"machine-{os.getpid()}.so"
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-mno-red-zone", "-mavx2", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, MACHINE_C, "-o", new], check=True)
        new.replace(made)
        _library = made
    return _library


_library: Path | None = None
