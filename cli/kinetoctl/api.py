"""The stable Python interface of kinetoctl, for schedulers, watchdogs and notebooks.

    from kinetoctl import api

    everything = api.Selection(ranks=(api.ANY_RANK,))
    capture = api.capture(everything, api.CaptureOptions(hosts=["n1", "n2"], duration_s=5))
    result = capture.wait()
    files = capture.fetch("traces")
    for row in capture.report("findings"):
        print(row["title"])

    print(api.stacks(everything, api.HostOptions(hosts=["n1", "n2"])).verdict)  # where each rank stands

A capture runs on one daemon or on many. Nothing here prints or exits. A failure of one host or process is part of the
result; a failure that leaves no trace at all is raised as one of `kinetoctl.errors`. The daemons own a capture: it ends
on its own, whether or not this program waits for it. The calls block; in a running event loop they use a
thread of their own. Programs with an event loop have `async_capture`.
"""

import asyncio
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kineto_protos.call_values import ANY_RANK
from kineto_protos.endpoints import rpc_address
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import more, shortened
from kineto_trace.base.visible_text import one_line

from kinetoctl.client import enum_names
from kinetoctl.client.enum_names import RECORDERS
from kinetoctl.client.fleet.fleet_files import bring, merge_files, new_id
from kinetoctl.client.fleet.fleet_run import REQUIREMENTS, WARMUP_NS, FleetRequest, FleetRun, run_fleet
from kinetoctl.client.fleet.host_client import ask, in_thread
from kinetoctl.client.fleet.host_run import LOST, Fleet
from kinetoctl.client.host_targets import Place, PlaceOptions, places
from kinetoctl.client.selection import Selection
from kinetoctl.client.slurm import parse_slurm_job
from kinetoctl.client.tracing import Quiet
from kinetoctl.errors import CliError, NotFound, Refused, TimedOut, UsageProblem
from kinetoctl.output.stack_page import StandingTimes, document, look_of, page

__all__ = [
    "ANY_RANK",
    "AsyncCapture",
    "Capture",
    "CaptureOptions",
    "CaptureResult",
    "Files",
    "HostOptions",
    "Place",
    "ProcessResult",
    "Selection",
    "StackResult",
    "async_capture",
    "capture",
    "stacks",
]


def __dir__() -> list[str]:
    """Return the names of the interface, for completion in notebooks: not those that this module imports."""
    return sorted(__all__)


SECOND_NS = 1_000_000_000
SHOWN_PROCESSES, SHOWN_ROWS, SHOWN_TEXT = 5, 20, 200  # in what is printed of a result
SHOWN_LINES = 200  # of stacks, in a notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """The outcome of one process.

    rank: None if the process has none. verdict: DONE, PARTIAL, FAILED or CANCELLED, or UNKNOWN if its host was lost.
    reason_code: one of docs/errors.md, or HOST_LOST. paths: format -> fetched file on this machine.
    """

    host: str
    pid: int
    rank: int | None
    verdict: str
    reason_code: str
    reason: str
    paths: Mapping[str, Path]

    def __repr__(self) -> str:
        why = " ".join(filter(None, (self.reason_code, self.reason)))
        return f"<{shown(self.name)}: {self.verdict}{f' ({shown(why)})' if why else ''}>"

    @property
    def name(self) -> str:
        """Rank, pid and host, as far as they are known."""
        return f"{'' if self.rank is None else f'rank {self.rank}, '}pid {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureResult:
    """The outcome of a capture.

    failed_hosts: host -> error message. missing_ranks: selected ranks that no host has.
    start_ns: when the windows began, in Unix ns by this machine's clock; 0 if they had no common start time.
    clocks: host -> (offset to add to the host's times, uncertainty of that offset), both in ns.
    warnings: those of hosts and processes.
    """

    id: str
    processes: tuple[ProcessResult, ...]
    failed_hosts: Mapping[str, str]
    missing_ranks: tuple[int, ...]
    start_ns: int
    clocks: Mapping[str, tuple[int, int]]
    warnings: tuple[str, ...]

    @property
    def done(self) -> bool:
        """Whether every process of every host was recorded and stored completely."""
        complete = bool(self.processes) and all(process.verdict == "DONE" for process in self.processes)
        return complete and not self.failed_hosts and not self.missing_ranks

    def __repr__(self) -> str:
        lines = self._remarks(SHOWN_PROCESSES)
        unfinished = [process for process in self.processes if process.verdict != "DONE"]
        left = len(unfinished) - SHOWN_PROCESSES
        lines += [repr(process) for process in unfinished[:SHOWN_PROCESSES]]
        return "\n  ".join(
            [f"<CaptureResult {self._verdicts()}>", *lines, *([f"and {left:,} more"] if left > 0 else [])]
        )

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        from kineto_trace.base import visible_text as html

        first = sorted(self.processes, key=lambda process: process.verdict == "DONE")[:SHOWN_ROWS]
        rows = [
            ("" if p.rank is None else str(p.rank), p.host, str(p.pid), p.verdict, p.reason_code, shown(p.reason))
            for p in first
        ]
        left = len(self.processes) - len(first)
        rest = [f"and {more(left, 'process', 'processes')}"] if left else []
        table = html.table(("rank", "host", "pid", "verdict", "code", "reason"), rows)
        return str(html.title(f"Capture {self._verdicts()}") + table + html.notes([*rest, *self._remarks(SHOWN_ROWS)]))

    def _verdicts(self) -> str:
        counts = Counter(process.verdict.replace("UNSPECIFIED", "without a verdict") for process in self.processes)
        return f"{shown(self.id)}: " + (", ".join(f"{n:,} {name}" for name, n in counts.items()) or "no process")

    def _remarks(self, most: int) -> list[str]:
        """Failed hosts, missing ranks and warnings; at most so many."""
        missing = ", ".join(map(str, self.missing_ranks))
        found = [f"failed: {shown(f'{host}: {text}')}" for host, text in self.failed_hosts.items()]
        found += [f"missing ranks: {shown(missing)}"] if missing else []
        found += [f"warning: {shown(text)}" for text in self.warnings]
        left = len(found) - most
        return found[:most] + ([f"and {more(left, 'remark')}"] if left > 0 else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The fetched files of a capture.

    folder: holds the traces of the processes. merged: one trace of all of them, or None if there is none.
    uncertainty_ns: upper limit of the clock error between ranks in the merged trace, in ns; None if unknown.
    problems: one message for each file that could not be fetched or merged.
    """

    folder: Path
    merged: Path | None
    uncertainty_ns: int | None
    problems: tuple[str, ...]


def shown(text: str) -> str:
    """Returns a text of others on one short line."""
    return one_line(shortened(text, SHOWN_TEXT))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackResult:
    """Where processes stood at one moment, as `kinetoctl stacks` shows it.

    verdict: what that means, one line for each job. groups: of processes whose main threads stood in the same place,
    the smallest first. processes: each with its threads and their frames. Both are dictionaries, as in
    `kinetoctl stacks -o json`, with the host of each process. text: what the command prints.
    failed_hosts: host -> error message, of hosts that gave no answer or only a part.
    """

    verdict: str
    groups: tuple[Mapping[str, Any], ...]
    processes: tuple[Mapping[str, Any], ...]
    failed_hosts: Mapping[str, str]
    text: str

    @property
    def complete(self) -> bool:
        """Whether every host answered in full and every process could be read."""
        return not self.failed_hosts and not any(each["reason"] for each in self.processes)

    def __repr__(self) -> str:
        count = len(self.processes)
        return f"<StackResult of {count:,} process{'' if count == 1 else 'es'}: {shown(self.verdict)}>"

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        from kineto_trace.base import visible_text as html

        lines = self.text.splitlines()
        left = len(lines) - SHOWN_LINES
        rest = [f"and {more(left, 'line')}"] if left > 0 else []
        return str(html.lines(lines[:SHOWN_LINES]) + html.notes(rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Which daemons are asked: hosts, slurm_job and at together; if all are empty, the one daemon at address.

    hosts: each a name, host:port or unix:/path. slurm_job: the processes of this job on its nodes.
    at: further daemons, from any source. address: empty for the daemon that `kinetoctl` uses.
    host_address: template of a daemon's address, with {host} or {address}; None for KINETO_HOST_ADDRESS.
    timeout_s: limit for one answer of a daemon.
    """

    hosts: Sequence[str] = ()
    slurm_job: str = ""
    at: Sequence[Place] = ()
    address: str = ""
    host_address: str | None = None
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions(HostOptions):
    """Where, when and what to record. Most fields are options of `kinetoctl trace`.

    Where: the fields of HostOptions.
        require: "all", "quorum" (more than half) or "any" of the hosts must be ready, or nothing starts.
    When: duration_s, unless iterations is given. start_at_s: Unix time; None for as soon as all hosts can.
        warmup_s: collection before the window that is not kept; None for 0.5 s. Both apply to durations only.
    What: activities: Kineto's types; empty for all that cost little. recording: fields of Options in profiler.proto,
        for example {"record_shapes": True}. formats: files to write; empty for chrome.
        counters: hardware counters to sample, a set such as "overview" or a sequence of the vendor's metrics; None for
        none. counter_interval_s: the time between two samples; 0 for 1 ms or the shortest of the GPU, if that
        is longer.
        attach: whether an agent may be brought into a process that has none. recorder: "agent" or "kineto", who records
        in processes that were started with KINETO_USE_DAEMON; None for what the daemon is set to.
    idempotency_key: the same key again returns the same capture.
    """

    require: str = "any"
    duration_s: float = 5.0
    iterations: int | None = None
    start_at_s: float | None = None
    warmup_s: float | None = None
    activities: Sequence[str] = ()
    recording: Mapping[str, bool | int] = field(default_factory=dict)
    counters: str | Sequence[str] | None = None
    counter_interval_s: float = 0.0
    formats: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    attach: bool = True
    recorder: str | None = None
    idempotency_key: str = ""


class Capture:
    """A capture that has started. All methods can be called repeatedly.

    As a context manager it ends with the block: left normally, the block waits until every process has its verdict;
    left by an exception, it cancels the capture in all processes and discards what was recorded.
    """

    def __init__(self, request: FleetRequest, fleet: Fleet) -> None:
        """Call `capture` instead."""
        self._request, self._fleet = request, fleet
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.cancel()
        except CliError as problem:
            error.add_note(f"the capture could not be cancelled: {problem}")

    def __repr__(self) -> str:
        hosts = len(self._fleet.members)
        running = sum(member.is_running for member in self._fleet.members)
        state = f"running on {running:,}" if running else "ended"
        return f"<Capture {shown(self.id)} on {hosts:,} host{'s' if hosts > 1 else ''}: {state}>"

    @property
    def id(self) -> str:
        """The id of the whole, which `kinetoctl captures show ID --host …` takes. Each part has it as kineto.fleet."""
        return self._fleet.id

    def wait(self, timeout_s: float | None = None) -> CaptureResult:
        """Wait until every process has its verdict; timeout_s None waits without a limit.

        Raises TimedOut; the capture continues, and wait can be called again.
        """
        run = self._run()
        run_fleet(run, lambda: self._finish(run, timeout_s))
        return self.result()

    def _run(self) -> FleetRun:
        return FleetRun(self._request, self._fleet, Quiet())

    async def _finish(self, run: FleetRun, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await run.finish()
        except TimeoutError as exc:
            raise TimedOut(f"capture {self.id} has not ended after {timeout_s:g} s") from exc

    def cancel(self) -> CaptureResult:
        """Stop the capture in all processes and discard what was recorded."""
        run = self._run()
        run_fleet(run, run.cancel, run.finish)
        return self.result()

    def result(self) -> CaptureResult:
        """The result as known now, without asking the daemons."""
        fleet = self._fleet
        return CaptureResult(
            id=fleet.id,
            processes=tuple(_processes(fleet)),
            failed_hosts={member.place.host: str(member.error) for member in fleet.failed()},
            missing_ranks=tuple(fleet.missing_ranks()),
            start_ns=fleet.start_ns,
            clocks={
                member.place.host: (member.clock.offset_ns, member.clock.uncertainty_ns)
                for member in fleet.members
                if member.clock is not None
            },
            warnings=tuple(_warnings(fleet)),
        )

    def fetch(self, directory: str | PathLike[str], *, merge: bool = True) -> Files:
        """Download and verify the files after the capture has ended; with merge, also write one trace of all.

        Raises NotFound if there is no file at all, NotWritten if the directory cannot be made. Files that are missing
        are reported in Files.problems.
        """
        directory = Path(directory)
        progress = Quiet()
        folder = bring(self._fleet, directory, progress, timeout_s=self._request.timeout_s)
        if folder is None:
            raise NotFound(f"capture {self.id} has no files: {_why(self._fleet) or 'it has not ended'}")
        self._folder = folder
        made = merge_files(self._fleet, directory, progress) if merge else None
        return Files(
            folder=folder,
            merged=None if made is None else made.merged.written.path,
            uncertainty_ns=None if made is None else made.merged.alignment.uncertainty_ns,
            problems=tuple(map(str, self._fleet.all_problems())),
        )

    def report(self, view: str = "overview", **options: Any) -> list[dict[str, Any]]:
        """The rows of a view over the fetched traces; `kinetoctl report --describe` lists their columns.

        Raises UsageProblem before `fetch`, WrongAnalysis for an unknown view or option, TraceUnreadable.
        """
        if self._folder is None:
            raise UsageProblem("call fetch before report: a report needs the files")
        from kinetoctl.client.result_rows import plain_rows
        from kinetoctl.errors import trace_errors

        with trace_errors():
            from kineto_trace.catalog.view_catalog import find_view
            from kineto_trace.catalog.view_runner import Request, run_views
            from kineto_trace.open.trace_discovery import find_traces

            request = Request(view=find_view(view).name, options=options)
            (result,) = run_views([request], find_traces(self._folder))
        return plain_rows(result)


class AsyncCapture:
    """A capture for programs with an event loop: `async with api.async_capture(selection, options) as capture`.

    It starts when the block is entered and ends with it, as a Capture does: left normally, the block waits until every
    process has its verdict; left by an exception, or cancelled, it cancels the capture and discards what was recorded.
    The files can be fetched inside and after the block. Nothing here blocks the event loop, and no thread stays.
    """

    def __init__(self, selection: Selection, options: CaptureOptions) -> None:
        """Call `async_capture` instead."""
        self._selection, self._options = selection, options
        self._started: Capture | None = None

    async def __aenter__(self) -> Self:
        """Starts the capture. Raises the errors of `capture`."""
        request = await in_thread(lambda: _request(self._selection, self._options))
        fleet = request.new_fleet()
        async with FleetRun(request, fleet, Quiet()) as run:
            try:
                await run.begin()
            except BaseException:
                await run.cancel()
                raise
        _check_begun(fleet)
        self._started = Capture(request, fleet)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if error is None:
            await self.wait()
            return
        try:
            await self.cancel()
        except CliError as problem:
            error.add_note(f"the capture could not be cancelled: {problem}")

    def __repr__(self) -> str:
        return repr(self._started) if self._started else "<AsyncCapture: not entered>"

    @property
    def id(self) -> str:
        """The id of the whole, as that of a Capture."""
        return self._capture.id

    async def wait(self, timeout_s: float | None = None) -> CaptureResult:
        """Wait as Capture.wait does. Raises TimedOut."""
        async with self._capture._run() as run:
            await self._capture._finish(run, timeout_s)
        return self.result()

    async def cancel(self) -> CaptureResult:
        """Stop the capture in all processes and discard what was recorded."""
        async with self._capture._run() as run:
            await run.cancel()
            await run.finish()
        return self.result()

    def result(self) -> CaptureResult:
        """The result as known now, without asking the daemons."""
        return self._capture.result()

    async def fetch(self, directory: str | PathLike[str], *, merge: bool = True) -> Files:
        """Download the files as Capture.fetch does. If it is cancelled, the downloads end by themselves."""
        return await in_thread(lambda: self._capture.fetch(directory, merge=merge))

    async def report(self, view: str = "overview", **options: Any) -> list[dict[str, Any]]:
        """The rows of a view, as Capture.report."""
        return await in_thread(lambda: self._capture.report(view, **options))

    @property
    def _capture(self) -> Capture:
        if self._started is None:
            raise UsageProblem("the capture has not started: use it as `async with api.async_capture(…) as capture`")
        return self._started


def capture(selection: Selection, options: CaptureOptions | None = None) -> Capture:
    """Start a capture of the selected processes, on all hosts at the same time, and return once it is running.

    selection: needs at least one condition, unless every place selects its processes itself, as a Slurm job does.

    Raises UsageProblem for arguments that are invalid or contradict each other, the errors of Slurm for slurm_job,
    Refused if no host could start, or, with a single host, that host's error.
    """
    request = _request(selection, options or CaptureOptions())
    fleet = request.new_fleet()
    run = FleetRun(request, fleet, Quiet())
    run_fleet(run, run.begin)
    _check_begun(fleet)
    return Capture(request, fleet)


def async_capture(selection: Selection, options: CaptureOptions | None = None) -> AsyncCapture:
    """Return a capture that starts when `async with` enters it. The arguments are those of `capture`."""
    return AsyncCapture(selection, options or CaptureOptions())


def stacks(selection: Selection, options: HostOptions | None = None) -> StackResult:
    """Look where the selected processes stand, and return what that means. They are read from outside and go on.

    selection: as for `capture`. A process or host that could not be read is part of the result.

    Raises UsageProblem for arguments that are invalid or contradict each other, the errors of Slurm for slurm_job,
    NotFound if no process matches, or the first host's error if no host answers.
    """
    options = options or HostOptions()
    where, selector = _places(selection, options), selection.to_proto()
    look = look_of(
        ask(where, lambda client, place: client.stacks(place.selected(selector)), timeout_s=options.timeout_s)
    )
    stood = StandingTimes().after(look).of
    found = document(look, stood)
    return StackResult(
        verdict=found["verdict"],
        groups=tuple(found["groups"]),
        processes=tuple(found["processes"]),
        failed_hosts=dict(look.failures),
        text="\n".join(map(one_line, page(look, stood, wide=False, all_threads=False))),
    )


def _request(selection: Selection, options: CaptureOptions) -> FleetRequest:
    where = _places(selection, options)
    if options.require not in REQUIREMENTS:
        raise UsageProblem(f"require: expected {', '.join(REQUIREMENTS)}, got {options.require!r}")
    return FleetRequest(
        id=options.idempotency_key or new_id(),
        places=where,
        spec=_spec(selection, options),
        require=options.require,
        timeout_s=options.timeout_s,
    )


def _spec(selection: Selection, options: CaptureOptions) -> pb.CaptureSpec:
    recorded: dict[str, Any] = dict(options.recording)
    try:
        recording = pb.Options(**recorded)
    except (TypeError, ValueError) as exc:
        raise UsageProblem(f"recording: {exc}") from exc
    spec = pb.CaptureSpec(
        selector=selection.to_proto(),
        start_time_ns=int((options.start_at_s or 0) * SECOND_NS),
        activity_types=options.activities,
        options=recording,
        formats=options.formats,
        labels=options.labels,
        no_attach=not options.attach,
        recorder=_recorder(options.recorder),
    )
    if options.counters is not None:
        spec.counters.interval_ns = round(options.counter_interval_s * SECOND_NS)
        if isinstance(options.counters, str):
            spec.counters.set = options.counters
        else:
            spec.counters.metrics.extend(options.counters)
    if options.iterations is None:
        spec.duration_ns = int(options.duration_s * SECOND_NS)
        spec.warmup_ns = WARMUP_NS if options.warmup_s is None else int(options.warmup_s * SECOND_NS)
    else:
        spec.iterations.count = options.iterations
    return spec


def _recorder(name: str | None) -> pb.Recorder:
    if name is not None and name not in RECORDERS:
        raise UsageProblem(f"recorder: expected {' or '.join(RECORDERS)}, got {name!r}")
    return pb.RECORDER_UNSPECIFIED if name is None else RECORDERS[name]


def _places(selection: Selection, options: HostOptions) -> list[Place]:
    try:
        job = parse_slurm_job(options.slurm_job) if options.slurm_job else None
        named = PlaceOptions(hosts=tuple(options.hosts), host_address=options.host_address, slurm_job=job)
        found = [*places(named, lambda _note: None), *options.at]
    except ValueError as exc:
        raise UsageProblem(str(exc)) from exc
    found = found or [Place(platform.node(), options.address or rpc_address())]
    if not selection and not all(place.selects for place in found):
        raise UsageProblem("no process is selected: a selection needs at least one condition")
    return found


def _check_begun(fleet: Fleet) -> None:
    """Raises the error that says why no host has started."""
    if fleet.interrupted:
        raise KeyboardInterrupt
    failed: list[CliError] = [member.error for member in fleet.members if member.error is not None]
    if any(member.started for member in fleet.members):
        return
    if len(fleet.members) == 1 and failed:
        raise failed[0]
    raise Refused(f"{fleet.unmet or 'no host started'}: {_why(fleet)}")


def _why(fleet: Fleet) -> str:
    """The first few reasons that hosts and processes give."""
    reasons = [f"{member.place.host}: {member.error}" for member in fleet.failed()]
    reasons += [
        f"{member.place.host} {enum_names.target(t)}: {t.reason}" for member, t in fleet.processes() if t.reason
    ]
    return "; ".join(reasons[:4]) + ("; …" if len(reasons) > 4 else "")


def _processes(fleet: Fleet) -> list[ProcessResult]:
    found = []
    for member, target in fleet.processes():
        lost = member.is_lost(target)
        own = target.pid, target.start_time_ns
        found.append(
            ProcessResult(
                host=member.place.host,
                pid=target.pid,
                rank=target.process.rank if target.process.HasField("rank") else None,
                verdict="UNKNOWN" if lost else enum_names.verdict(target.verdict),
                reason_code=LOST if lost else target.reason_code,
                reason=str(member.error) if lost else target.reason,
                paths={name: path for (*key, name), path in member.paths.items() if tuple(key) == own},
            )
        )
    return found


def _warnings(fleet: Fleet) -> list[str]:
    found = [f"{member.place.host}: {warning}" for member in fleet.members for warning in member.warnings]
    return found + [
        f"{member.place.host} {enum_names.target(target)}: {warning}"
        for member, target in fleet.processes()
        for warning in target.warnings
    ]
