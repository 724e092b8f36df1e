"""One program, untouched and traced: what is done with it, in which order, and what came of it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpu.zoo import figures
from gpu.zoo.captures import DEFAULTS, Capture, Tracer
from gpu.zoo.catalog import Program
from gpu.zoo.figures import Memory, Row
from gpu.zoo.life import Skip
from gpu.zoo.process import END_S, Ended, Running, gpu_bytes, resident_bytes
from gpu.zoo.toolchain import Toolchain

LEAST_END_S = 20.0
LAST_WORDS_S = 5.0  # of a session's time are kept for the end of the program
SLOW_REFUSAL_S, MOST_SLOW_REFUSALS = 5.0, 3
INTO_THE_CAPTURE_S = 0.2
CATCH_UP_POLL_S = 0.1
SETTLED = (12, 13)  # captures after which memory may not grow any more; the agent has stayed after one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done with every program.

    kinds: activity types recorded alone, `each` times; (): all that the program offers. keep_agent: "default", "mixed"
    (every second capture asks that the agent leaves at once) or seconds. reference: an untouched run "beside" the
    traced one, "before" it for untouched_s, or "none". total: captures instead of defaults and kinds, 0: those.
    deadline: of time.monotonic(). rounds: of programs that end by themselves.
    """

    device: str = "cuda"
    defaults: int = 20
    each: int = 5
    kinds: tuple[str, ...] = ()
    keep_agent: str = "mixed"
    reference: str = "beside"
    untouched_s: float = 8.0
    before_s: float = 5.0
    after_s: float = 60.0
    ready_s: float = 180.0
    rounds: int = 4
    total: int = 0
    deadline: float = float("inf")

    def left_s(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()


class Session:
    """One program's turn. `run` gives its row, whatever happens."""

    def __init__(self, program: Program, plan: Plan, tracer: Tracer, toolchain: Toolchain, folder: Path) -> None:
        self.program, self.plan, self.tracer, self.toolchain, self.folder = program, plan, tracer, toolchain, folder
        self.row = Row(name=program.name)
        self.captures: list[Capture] = []
        self._started: list[Running] = []
        self._slow_refusals = 0

    def run(self) -> Row:
        """The row of the table."""
        begin = time.monotonic()
        try:
            if self.program.end == "self":
                self._ends_by_itself()
            else:
                self._to_the_end()
        except Skip as exc:
            self.row.state = "skipped"
            self.row.notes.append(str(exc))
        finally:
            for running in self._started:
                running.kill()
        figures.count_captures(self.row, self.captures)
        self.row.seconds = round(time.monotonic() - begin, 1)
        return self.row

    def _start(self, name: str) -> Running:
        most_s = min(3600.0, max(60.0, self.plan.left_s() + 60))
        running = Running(self.program, self.folder / name, self.toolchain, self.plan.device, most_s)
        self._started.append(running)
        return running

    def _to_the_end(self) -> None:
        untouched = self._untouched() if self.plan.reference == "before" and self.program.twin else None
        traced = self._start("traced")
        twin = self._start("twin") if self.plan.reference == "beside" and self.program.twin else None
        if (pids := self._ready(traced)) is None:
            return
        if twin is not None and not self._twin_ready(twin):
            twin = None
        ready_ns = time.time_ns()
        both = [running for running in (traced, twin) if running is not None]
        self._wait(traced, self.plan.before_s)
        self._measure("before", both)
        for kind in self._kinds():
            if not traced.alive() or not self._take(traced, pids, kind):
                break
            if len(self.captures) == 1:
                self._measure("first", both)
            if len(self.captures) in SETTLED:
                self._measure("settled", both)
        self._measure("last", both)
        self._wait(traced, self._after_s())
        self._measure("end", both)
        self._end(traced, pids)
        reference = twin or untouched
        if twin is not None:
            if self.row.state == "HARMED":
                self._let_catch_up(twin, len(traced.times()))
            twin.ask_to_end()
            if twin.await_end(self._end_s()) != self.program.status:
                self.row.notes.append(f"the untouched program ended with {twin.process.returncode}")
                reference = None
        self._compare(traced, reference, ready_ns)
        if twin is not None and reference is None:
            self.row.state = "not run"  # it fails by itself: nothing can be told of the traced one

    def _ready(self, running: Running) -> list[int] | None:
        """The pids of the program; None: it did not come up, which is not our doing."""
        try:
            return running.await_ready(time.monotonic() + self._ready_s())
        except (Ended, TimeoutError) as exc:
            self.row.state = "not run"
            what = f"ended with {running.process.returncode}" if isinstance(exc, Ended) else "took too long to come up"
            self.row.notes.append(f"the program {what}, untouched")
            self.row.stderr = running.stderr_tail()
            return None

    def _twin_ready(self, twin: Running) -> bool:
        with contextlib.suppress(Ended, TimeoutError, Skip):
            twin.await_ready(time.monotonic() + self._ready_s())
            return True
        self.row.notes.append("the untouched program did not come up")
        twin.kill()
        return False

    def _untouched(self) -> Running:
        """A run that nobody traces, to its end."""
        running = self._start("untouched")
        if self._ready(running) is not None:
            self._wait(running, self.plan.untouched_s)
            running.ask_to_end()
            running.await_end(self._end_s())
        self.row.state, self.row.notes, self.row.stderr = "unharmed", [], ""
        return running

    def _wait(self, running: Running, seconds: float) -> None:
        """Some time, or until the program has died."""
        with contextlib.suppress(Exception):
            running.process.wait(max(0.0, min(seconds, self.plan.left_s() - LAST_WORDS_S)))

    def _let_catch_up(self, twin: Running, iterations: int) -> None:
        """Waits until the untouched program is beyond the iteration in which the traced one failed: it may fail too."""
        end = time.monotonic() + self._end_s()
        while twin.alive() and len(twin.times()) <= iterations and time.monotonic() < end:
            self._wait(twin, CATCH_UP_POLL_S)

    def _after_s(self) -> float:
        return max(LAST_WORDS_S, min(self.plan.after_s, self.plan.left_s() - LAST_WORDS_S))

    def _kinds(self) -> Iterator[str]:
        """What to record, capture by capture. Kinds that are offered are known after the first one."""
        if self.plan.total:
            yield from itertools.islice(itertools.cycle([DEFAULTS, DEFAULTS, "kernel"]), self.plan.total)
            return
        yield from itertools.repeat(DEFAULTS, self.plan.defaults)
        offered = max((one.offered for one in self.captures), key=len, default=())
        for kind in self.plan.kinds or offered:
            if not offered or kind in offered:
                yield from itertools.repeat(kind, self.plan.each)

    def _keep_agent_s(self) -> float | None:
        if self.plan.keep_agent == "mixed":
            return 0.0 if len(self.captures) % 2 else None
        return None if self.plan.keep_agent == "default" else float(self.plan.keep_agent)

    def _take(self, traced: Running, pids: list[int], kind: str) -> bool:
        """One capture. False: the program has died of it, or there is no time for more."""
        if self.plan.left_s() < self._reserve_s():
            self.row.notes.append(f"the time was over after {len(self.captures)} captures")
            return False
        begin = time.monotonic()
        made = self.tracer.capture(pids, kind, self._keep_agent_s())
        self.captures.append(replace(made, requested_ns=made.requested_ns or time.time_ns()))
        slow = made.verdict in ("REFUSED", "FAILED") and time.monotonic() - begin > SLOW_REFUSAL_S
        self._slow_refusals = self._slow_refusals + 1 if slow else 0
        if self._slow_refusals >= MOST_SLOW_REFUSALS:
            self.row.notes.append(f"{MOST_SLOW_REFUSALS} slow refusals in a row after {len(self.captures)} captures")
            return False
        return traced.alive()

    def _reserve_s(self) -> float:
        """What the rest of the session needs: a third of the time after the captures, at least some seconds."""
        return LAST_WORDS_S * 2 + self.plan.after_s / 3

    def _ready_s(self) -> float:
        return max(LEAST_END_S, min(self.plan.ready_s, self.plan.left_s() - LAST_WORDS_S))

    def _end_s(self) -> float:
        """How long to wait for an end: less where the time is over."""
        return max(LEAST_END_S, min(END_S, self.plan.left_s()))

    def _end(self, traced: Running, pids: list[int]) -> None:
        """End the traced program and see whether it had ended before, and how it does."""
        if not traced.alive():
            self._died(traced)
            return
        if self.program.end == "term":
            self._end_in_a_capture(traced, pids)
        else:
            traced.ask_to_end()
        status = traced.await_end(self._end_s())
        self._judge_end(traced, status)

    def _end_in_a_capture(self, traced: Running, pids: list[int]) -> None:
        last: list[Capture] = []
        capture = threading.Thread(target=lambda: last.append(self.tracer.capture(pids, DEFAULTS, None)))
        capture.start()
        self._wait(traced, INTO_THE_CAPTURE_S)
        traced.ask_to_end()
        capture.join()
        self.captures += last

    def _died(self, running: Running) -> None:
        status, count = running.process.returncode, len(self.captures)
        if wrong := running.events("wrong"):
            what = f"wrong result: {wrong[0]['what']} (iteration {wrong[0]['iteration']})"
        else:
            what = f"died with status {status}"
        ends = [one.stored_ns for one in self.captures if one.stored_ns]
        times = running.times()
        since = f", {(times[-1] - ends[-1]) / 1e9:.1f} s of work after its end" if ends and times else ""
        kind = (self.captures[-1].kind or "defaults") if self.captures else "none"
        self.row.harm(f"{what} after capture {count} ({kind}){since}", running.stderr_tail())

    def _judge_end(self, running: Running, status: int | None) -> None:
        if wrong := running.events("wrong"):
            self.row.harm(
                f"wrong result: {wrong[0]['what']} (iteration {wrong[0]['iteration']})", running.stderr_tail()
            )
        elif status is None:
            self.row.harm("hung: it did not end when it was asked to", running.stderr_tail())
        elif status != self.program.status:
            self.row.harm(f"ended with status {status} instead of {self.program.status}", running.stderr_tail())
        elif not running.events("end"):
            self.row.harm("ended without its last words", running.stderr_tail())

    def _measure(self, point: str, both: list[Running]) -> None:
        """Memory of the traced program and of its twin, the most if the point comes twice."""
        for running, into in zip(both, (self.row.memory, self.row.twin_memory), strict=False):
            if running.alive() and (ready := running.events("ready")):
                pid = int(ready[0]["pids"][0])
                gpu = gpu_bytes(pid) if self.plan.device == "cuda" else 0
                last = into.get(point, Memory())
                into[point] = Memory(rss=max(last.rss, resident_bytes(pid)), gpu=max(last.gpu, gpu))

    def _compare(self, traced: Running, reference: Running | None, ready_ns: int) -> None:
        untouched = reference.times() if reference is not None else None
        figures.time_iterations(self.row, traced.times(), self.captures, ready_ns, untouched)
        figures.judge_memory(self.row)
        lost = [one.events("lost") for one in (traced, reference) if one is not None]
        figures.count_lost(self.row, lost[0], lost[1] if reference is not None else [])
        if reference is None:
            return
        if self.program.deterministic:
            figures.compare_digests(self.row, traced.digests(), reference.digests())
        own = [[int(event["count"]) for event in one.events("own")] for one in (traced, reference)]
        figures.compare_own_traces(self.row, own[0], own[1])

    def _ends_by_itself(self) -> None:
        """Round after round the program ends in the middle of captures that follow each other."""
        reference: Running | None = None
        if self.plan.reference != "none":
            reference = self._start("untouched")
            if self._ready(reference) is None:
                return
            if reference.await_end() != self.program.status:
                self.row.notes.append(f"the untouched program ended with {reference.process.returncode}")
        for number in range(self.plan.rounds):
            if self.plan.left_s() < self._reserve_s():
                self.row.notes.append(f"the time was over after {number} rounds")
                return
            traced = self._start(f"traced-{number}")
            if (pids := self._ready(traced)) is None:
                return
            while traced.alive():
                self.captures.append(self.tracer.capture(pids, DEFAULTS, self._keep_agent_s()))
            self._judge_end(traced, traced.process.returncode)
            self.row.iterations += len(traced.times())
            if reference is not None and self.program.deterministic:
                figures.compare_digests(self.row, traced.digests(), reference.digests())
            if self.row.state == "HARMED":
                return


def run_session(program: Program, plan: Plan, tracer: Tracer, toolchain: Toolchain, folder: Path) -> Row:
    """The row of one program; its folder is removed unless it is harmed or did not come up."""
    row = Session(program, plan, tracer, toolchain, folder).run()
    if row.state in ("unharmed", "skipped"):
        shutil.rmtree(folder, ignore_errors=True)
    return row
