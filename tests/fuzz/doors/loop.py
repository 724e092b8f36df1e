"""The loop: case after case into one door, with the watched processes' memory and descriptors looked at.

Case number N of seed S is the same in every run: `random.Random(f"{S}-{N}")` makes it. A failing one is kept in
build/fuzz as JSON; `play` does it again.
"""

import base64
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from support.machine.descriptors import open_files
from support.machine.native import ROOT
from support.waiting import scaled

KEPT = ROOT / "build" / "fuzz"
LOOK_PERIOD_S = 2.0
SLOW_S = 20.0  # a case that takes longer hangs
MORE_BYTES = 24 << 20  # what a process may have grown since a quarter of the time was over
MORE_SHARE = 0.10
MORE_DESCRIPTORS = 8
SETTLE_S = 20.0
PAGE = 4096
Case = list[bytes]


class Failure(Exception):
    """The service did what it must not."""


class Door(Protocol):
    """A place at which input enters a process under test."""

    name: str

    def case(self, rng: random.Random) -> Case:
        """Makes the next input."""

    def play(self, case: Case) -> str:
        """Puts it in and says in a word what became of it. Raises Failure, or whatever goes wrong."""

    def processes(self) -> dict[str, int]:
        """The processes that must not grow: what they are, and their pid."""

    def settle(self) -> None:
        """Waits until nothing is under way any more and looks whether everything is in order. Raises Failure."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Memory and descriptors of one process at one moment."""

    bytes: int
    descriptors: int


@dataclass(slots=True)
class Report:
    """What a run has done and found."""

    name: str
    seed: int
    done: int = 0
    seconds: float = 0
    slowest_s: float = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    figures: dict[str, list[Figures]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        rate = self.done / max(self.seconds, 0.001)
        found = [
            f"{self.name}: {self.done} cases in {self.seconds:.0f} s ({rate:.0f}/s), seed {self.seed}, "
            f"slowest {self.slowest_s * 1000:.0f} ms"
        ]
        found.append("  " + ", ".join(f"{count} {what}" for what, count in self.outcomes.most_common(24)))
        for who, seen in self.figures.items():
            most = max(each.bytes for each in seen)
            tenths = " ".join(f"{seen[(len(seen) - 1) * part // 10].bytes / 1e6:.1f}" for part in range(11))
            found.append(
                f"  {who}: RSS in MB after each tenth {tenths}, {_mb(most)} at most; "
                f"descriptors {seen[0].descriptors} at first, {seen[-1].descriptors} at the end"
            )
        return found


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def figures_of(pid: int) -> Figures:
    """Resident memory and open descriptors now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Figures(pages * PAGE, len(open_files(pid)))


def run(door: Door, *, seed: int, rounds: int | None = None, seconds: float | None = None, first: int = 0) -> Report:
    """Plays cases until the rounds or the seconds are over. Raises Failure, with the case kept."""
    report = Report(door.name, seed)
    begin = time.monotonic()
    looked = 0.0
    while report.done != rounds and (seconds is None or time.monotonic() - begin < seconds):
        number = first + report.done
        if time.monotonic() - looked >= LOOK_PERIOD_S and report.done >= 20:
            look(door, report)
            looked = time.monotonic()
        case = door.case(random.Random(f"{seed}-{number}"))
        before = time.monotonic()
        try:
            report.outcomes[door.play(case)] += 1
            took = time.monotonic() - before
            report.slowest_s = max(report.slowest_s, took)
            if took > scaled(SLOW_S):
                raise Failure(f"it took {took:.1f} s")
        except Exception as exc:
            raise Failure(f"{door.name}, seed {seed}, case {number}, kept in {keep(door, seed, number, case)}") from exc
        report.done += 1
    door.settle()
    look(door, report)
    report.seconds = time.monotonic() - begin
    if report.done >= 1000:  # before that, what is made once looks like growth
        check_growth(report)
    return report


def look(door: Door, report: Report) -> None:
    """Notes the figures of all processes."""
    for who, pid in door.processes().items():
        report.figures.setdefault(who, []).append(figures_of(pid))


def check_growth(report: Report) -> None:
    """Raises Failure if a process has grown."""
    for who, seen in report.figures.items():
        before, after = seen[len(seen) // 4], seen[-1]
        if after.bytes > before.bytes * (1 + MORE_SHARE) + MORE_BYTES:
            raise Failure(f"{report.name}: the {who} grew from {_mb(before.bytes)} to {_mb(after.bytes)}")
        if after.descriptors > before.descriptors + MORE_DESCRIPTORS:
            raise Failure(
                f"{report.name}: the {who} had {before.descriptors} descriptors open, then {after.descriptors}"
            )


def keep(door: Door, seed: int, number: int, case: Case) -> Path:
    """Writes a case to a file, to be replayed."""
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{door.name}-{seed}-{number}.json"
    path.write_text(json.dumps([base64.b64encode(part).decode() for part in case]))
    return path


def kept(path: Path) -> Case:
    """A case that was written down."""
    return [base64.b64decode(part) for part in json.loads(path.read_text())]
