"""Runs of programs, one at a time in each place; the control of a program once for all of its causes."""

import json
import queue
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from kineto_trace.catalog.first_screen import FirstScreen, verdict
from support.service.daemon import Daemon

from rootcause.causes import Cause
from rootcause.judgement import Verdict, judge, without_neighbours
from rootcause.measure import NO_CPU, Measured, Place, measure, screen_of


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a program, and what a reader sees first of its trace."""

    measured: Measured
    screen: FirstScreen


class Runs:
    """Measures programs in other threads, in the order of the causes. Leave the context to end what is not yet begun.

    pairs: whether each cause has a control of its own, that runs after it.
    """

    def __init__(self, daemon: Daemon, folder: Path, places: Sequence[Place], pairs: bool) -> None:
        self._daemon, self._folder, self._pairs = daemon, folder, pairs
        self._pool = ThreadPoolExecutor(2 * len(places))  # half of them may analyse
        self._analyses = ProcessPoolExecutor(len(places), get_context("spawn"))
        self._free: queue.SimpleQueue[Place] = queue.SimpleQueue()
        for place in places:
            self._free.put(place)
        self._begun: dict[tuple[str, str], Future[Run]] = {}

    def __enter__(self) -> "Runs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._analyses.shutdown()

    def begin(self, causes: Sequence[Cause]) -> None:
        """Begins all runs that these causes need."""
        for cause in causes:
            for key, planted in (((cause.program, cause.name), cause.name), (self._control(cause), "")):
                if key not in self._begun:
                    self._begun[key] = self._pool.submit(self._run, cause, planted, "-".join(key))

    def verdict(self, cause: Cause, keep: Path | None) -> Verdict:
        """Waits for the cause's runs and judges them. keep: where to copy traces. Raises RuntimeError if one failed."""
        planted = self._begun[cause.program, cause.name].result()
        control = self._begun[self._control(cause)].result()
        if keep is not None:
            _keep(keep / cause.name, planted)
            _keep(keep / "-".join(self._control(cause)), control)
        return _judged(cause, planted, control)

    def _control(self, cause: Cause) -> tuple[str, str]:
        return cause.program, f"control-of-{cause.name}" if self._pairs else "control"

    def _run(self, cause: Cause, planted: str, name: str) -> Run:
        folder = self._folder / name
        folder.mkdir()
        place = self._free.get()
        try:
            options = cause.options if planted else ()
            measured = measure(self._daemon, cause.program, planted, folder, options, place)
            if not place.analysed_beside:
                return Run(measured, screen_of(measured.trace))
        finally:
            self._free.put(place)
        return Run(measured, self._analyses.submit(screen_of, measured.trace).result())


def judge_again(cause: Cause, folder: Path) -> Verdict:
    """Judges what was kept in this folder by the rules as they are now. Raises RuntimeError if it is not there."""
    planted, control = (_kept_run(folder / name) for name in (cause.name, f"{cause.program}-control"))
    return _judged(cause, planted, control)


def _judged(cause: Cause, planted: Run, control: Run) -> Verdict:
    told = _told(planted, own=cause.name in NO_CPU)
    return judge(cause, told, _told(control, own=False), _sentence(planted.screen, told[1]))


def _sentence(screen: FirstScreen, findings: Sequence[Mapping[str, Any]]) -> str:
    """The verdict if the trace had these findings alone."""
    table = pa.Table.from_pylist(list(findings), schema=screen.findings.table.schema)
    return verdict(replace(screen.findings, table=table), screen.time, ranks=1, traces=1)


def _kept_run(folder: Path) -> Run:
    try:
        told = json.loads((folder / "measured.json").read_text())
    except OSError as exc:
        raise RuntimeError(f"no kept run: {exc}") from exc
    trace = folder / "trace.json.gz"
    return Run(Measured(told["step_ms"], trace, told["waited_pct"]), screen_of(trace))


def _told(run: Run, *, own: bool) -> tuple[float, Sequence[Mapping[str, Any]]]:
    """own: the cause itself keeps processors from the program."""
    measured, findings = run.measured, run.screen.findings.rows()
    return measured.step_ms, findings if own else without_neighbours(findings, measured.waited_pct)


def _keep(folder: Path, run: Run) -> None:
    """Copies the trace, with what was measured beside it."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    measured = run.measured
    shutil.copy(measured.trace, folder / "trace.json.gz")
    (folder / "measured.json").write_text(
        json.dumps(
            {"step_ms": measured.step_ms, "waited_pct": measured.waited_pct, "findings": run.screen.findings.rows()}
        )
    )
