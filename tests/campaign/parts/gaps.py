"""The longest gap of a program during a trace and afterwards, beside an untouched twin at the same time.

Theory of operation
    Two equal processes start, each with a page of campaign.attach_targets.control in which it notes its gaps. One of
    them is traced by kinetoctl while the other one meets the same load of the machine. Then both are told to stop, and
    what they do next, and how they end, is compared, too. A gap that is our doing comes every time, one of a busy
    machine does not: `watch` looks several times where a bound is left, and the smallest excess counts.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from campaign.attach_targets.control import TOOK, USED
from campaign.parts.attach_harness import Ended, RunningTarget, version_of
from support.service.cli import run_process
from support.service.daemon import Daemon

ENDS_WITHIN_S = 60.0
# What differs from run to run by itself: addresses, pids, times.
CHANGING = re.compile(r"0x[0-9a-f]+|pid=\d+|process \d+|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one of the two has shown. Times in ms; took, used: wall and processor time of what it did next."""

    status: int | None = None  # None: it did not end
    output: str = ""
    errors: str = ""
    during: float = 0.0
    after: float = 0.0
    took: float = 0.0
    used: float = 0.0
    end: float = 0.0  # from the order to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A traced program and its twin."""

    name: str
    python: str
    verdict: str
    reason: str
    traced: Look
    untouched: Look

    def differences(self) -> list[str]:
        """What the trace changed, times apart."""
        return [
            f"{name} {getattr(self.traced, name)!r}, untouched {getattr(self.untouched, name)!r}"
            for name in ("status", "output", "errors")
            if getattr(self.traced, name) != getattr(self.untouched, name)
        ]

    def excess_ms(self) -> float:
        """By how much the longest gap, or what it did next, or its end, exceeds the twin's."""
        return max(float(getattr(self.traced, name) - getattr(self.untouched, name)) for name in TIMES)

    def waited_ms(self, which: str = "traced") -> float:
        """What it did next without its main thread using a processor."""
        look: Look = getattr(self, which)
        return max(0.0, look.took - look.used)

    def cells(self) -> list[str]:
        """Cells of the row in the table."""
        both = [f"{getattr(self.traced, name):.1f} ({getattr(self.untouched, name):.1f})" for name in SHOWN]
        return [self.name, self.python, self.verdict, *both, "; ".join(self.differences())[:300]]


TIMES = ("during", "after", "took", "end")
SHOWN = ("during", "after", "took", "used", "end")
HEADER = ("program", "Python", "verdict", "during", "after", "did next", "CPU of it", "to its end", "differs")


def table(pairs: Sequence[Pair]) -> str:
    """The results as a Markdown table: longest gaps in ms, the untouched twin's in brackets."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    return "\n".join(lines + ["| " + " | ".join(pair.cells()) + " |" for pair in pairs])


def watch_once(
    name: str,
    daemon: Daemon,
    python: str | Path = sys.executable,
    *,
    options: Sequence[str] = ("--duration", "500ms"),
    used_s: float = 0.0,
    after_s: float = 0.0,
    command: Sequence[str] = (),
) -> Pair:
    """Traces one of two processes once. command: instead of a program of campaign.attach_targets.later."""

    def start() -> RunningTarget:
        return RunningTarget(name, python, module="later", arguments=(name, f"{used_s:g}"), command=command)

    with start() as traced, start() as untouched, tempfile.TemporaryDirectory() as folder:
        for target in (traced, untouched):
            target.wait_ready()
        begin = time.monotonic_ns()
        arguments = ["trace", "--pid", str(traced.pid), "--output-dir", folder, "-o", "json", *options]
        result = run_process(arguments, daemon.client_environ())
        end = time.monotonic_ns()
        time.sleep(after_s)  # only serves to last
        over = time.monotonic_ns()
        looks = [
            (target.longest_ms(begin, end), target.longest_ms(end, over) if after_s else 0.0)
            for target in (traced, untouched)
        ]
        with ThreadPoolExecutor(2) as both:  # at the same time
            ends = list(both.map(_end, (traced, untouched), *zip(*looks, strict=True)))
    told = json.loads(result.stdout)["targets"][0] if result.stdout.startswith("{") else {}
    verdict = str(told.get("verdict", f"exit status {result.code}")).removeprefix("VERDICT_")
    reason = str(told.get("reason", "") or ("" if told else result.stderr))
    return Pair(
        name=name, python=version_of(python) if not command else "", reason=reason, traced=ends[0], untouched=ends[1],
        verdict=" ".join(filter(None, (verdict, str(told.get("reason_code", ""))))),
    )  # fmt: skip


def _end(target: RunningTarget, during: float, after: float) -> Look:
    begin = time.monotonic_ns()
    try:
        status, output = target.end(ENDS_WITHIN_S)
    except Ended:
        return Look(during=during, after=after, end=(time.monotonic_ns() - begin) / 1e6, errors="it did not end")
    return Look(
        status=status, output=CHANGING.sub("0x", output.decode("utf-8", "replace")),
        errors=CHANGING.sub("0x", target.errors()), during=during, after=after, took=target.words[TOOK] / 1e6,
        used=target.words[USED] / 1e6, end=(time.monotonic_ns() - begin) / 1e6,
    )  # fmt: skip


def watch(look: Callable[[], Pair], bound_ms: float, tries: int) -> Pair:
    """The look with the smallest excess, after so many tries or once the excess is below the bound."""
    best = look()
    for _ in range(tries - 1):
        if best.differences() or best.excess_ms() <= bound_ms:
            break
        best = min(best, look(), key=lambda pair: (not pair.differences(), pair.excess_ms()))
    return best


def possible(needs: str, python: str | Path) -> bool:
    """Whether that Python has the package."""
    return subprocess.run([python, "-c", f"import {needs}"], capture_output=True, check=False).returncode == 0
