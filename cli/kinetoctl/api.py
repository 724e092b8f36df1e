"""Traces from a program: the stable interface of kinetoctl, for schedulers, watchdogs and notebooks.

    from kinetoctl import api

    capture = api.capture(api.Selection(ranks=(api.ANY_RANK,)), hosts=["n1", "n2"], duration_s=5)
    result = capture.wait()
    files = capture.fetch("traces")
    for row in capture.report("findings"):
        print(row["title"])

One daemon or many: without hosts it is the one at `address`, or where `kinetoctl` looks for it. Nothing here prints or
exits; what goes wrong with a host or a process is in the result, what leaves no trace at all is raised as one of
`kinetoctl.errors`. The daemons own a capture: it ends by itself, whether this program waits or not.
"""

import asyncio
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from kineto_protos.endpoints import rpc_address
from kineto_protos.selector import ANY_RANK as ANY_RANK
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client import enum_names
from kinetoctl.client.fleet.event_loop import run_fleet
from kinetoctl.client.fleet.fleet_files import MergedFile
from kinetoctl.client.fleet.fleet_run import FleetRequest, FleetRun
from kinetoctl.client.fleet.host_run import LOST, Fleet
from kinetoctl.client.fleet.start_plan import REQUIREMENTS, WARMUP_NS
from kinetoctl.client.fleet.workflow import bring, merge_files, new_id
from kinetoctl.client.hosts.host_targets import Place as Place
from kinetoctl.client.hosts.host_targets import PlaceOptions, places
from kinetoctl.client.hosts.slurm import parse_slurm_job
from kinetoctl.errors import CliError, NotFound, Refused, TimedOut, UsageProblem
from kinetoctl.options.selection_options import Selection as Selection
from kinetoctl.output.fleet_progress import FleetQuiet

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What became of one process. verdict: DONE, PARTIAL, FAILED, CANCELLED; UNKNOWN if its host was lost.

    rank: None: it has none. reason_code: as in docs/errors.md, or HOST_LOST. paths: its files by format, once fetched.
    """

    host: str
    pid: int
    rank: int | None
    verdict: str
    reason_code: str
    reason: str
    paths: Mapping[str, Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a capture. failed_hosts: host -> why; warnings: of hosts and processes.

    start_ns: when the windows began, Unix ns by this machine's clock; 0: not at one moment. clocks: host -> what is to
    be added to its times, and how far that may be wrong, in ns.
    """

    id: str
    processes: tuple[Process, ...]
    failed_hosts: Mapping[str, str]
    missing_ranks: tuple[int, ...]
    start_ns: int
    clocks: Mapping[str, tuple[int, int]]
    warnings: tuple[str, ...]

    @property
    def done(self) -> bool:
        """Whether every process of every host was recorded and stored wholly."""
        whole = bool(self.processes) and all(process.verdict == "DONE" for process in self.processes)
        return whole and not self.failed_hosts and not self.missing_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of a capture here. folder: of those of the processes; merged: one trace of all, if it was made.

    uncertainty_ns: how far the ranks of the merged trace may be apart, at most; None: that is not known.
    problems: what is not here, and why.
    """

    folder: Path
    merged: Path | None
    uncertainty_ns: int | None
    problems: tuple[str, ...]


class Capture:
    """A capture that has begun. May be waited for at any time, also again."""

    def __init__(self, request: FleetRequest, fleet: Fleet) -> None:
        """Made by `capture`."""
        self._request, self._fleet = request, fleet
        self._folder: Path | None = None

    @property
    def id(self) -> str:
        """Of the whole: `kinetoctl captures show ID --host …` shows it, and the label kineto.fleet of every part."""
        return self._fleet.id

    def wait(self, timeout_s: float | None = None) -> Result:
        """Until every process has its verdict. Raises TimedOut; the capture goes on then, and can be waited for."""
        run = FleetRun(self._request, self._fleet, FleetQuiet())

        async def finish() -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await run.finish()
            except TimeoutError as exc:
                raise TimedOut(f"capture {self.id} has not ended after {timeout_s:g} s") from exc

        run_fleet(run, finish)
        return self.result()

    def cancel(self) -> Result:
        """Stops it in all processes; what was recorded is thrown away."""
        run = FleetRun(self._request, self._fleet, FleetQuiet())
        run_fleet(run, run.cancel, run.finish)
        return self.result()

    def result(self) -> Result:
        """As it is known now."""
        fleet = self._fleet
        return Result(
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
        """Brings and verifies the files, after the end. merge: also makes one trace of all.

        Raises NotFound if there is no file; what is missing of several is told in the answer.
        """
        directory = Path(directory)
        progress = FleetQuiet()
        folder = bring(self._fleet, directory, progress, timeout_s=self._request.timeout_s)
        if folder is None:
            raise NotFound(f"capture {self.id} has no file: {_why(self._fleet) or 'it has not ended'}")
        self._folder = folder
        made = merge_files(self._fleet, directory, progress) if merge else None
        problems = [*self._fleet.problems, *(each for member in self._fleet.members for each in member.problems)]
        return Files(
            folder=folder,
            merged=None if made is None else made.merged.written.path,
            uncertainty_ns=None if made is None else _uncertainty_ns(made),
            problems=tuple(map(str, problems)),
        )

    def report(self, view: str = "overview", **options: Any) -> list[dict[str, Any]]:
        """The rows of a view (docs/views.md) over the fetched traces; their columns are documented there.

        Raises UsageProblem before `fetch`, WrongAnalysis, TraceUnreadable.
        """
        if self._folder is None:
            raise UsageProblem("fetch the files before you ask for a report of them")
        from kinetoctl.options.trace_arguments import trace_errors
        from kinetoctl.output.result_tables import plain_rows

        with trace_errors():
            from kineto_trace.catalog.view_catalog import find_view
            from kineto_trace.catalog.view_runner import Request, run_views
            from kineto_trace.open.trace_discovery import find_traces

            request = Request(view=find_view(view).name, options=options)
            (result,) = run_views([request], find_traces(self._folder))
        return plain_rows(result)


def capture(
    selection: Selection,
    *,
    hosts: Sequence[str] = (),
    at: Sequence[Place] = (),
    slurm_job: str = "",
    address: str = "",
    host_address: str | None = None,
    duration_s: float = 5.0,
    iterations: int | None = None,
    start_at_s: float | None = None,
    warmup_s: float | None = None,
    activities: Sequence[str] = (),
    options: Mapping[str, bool | int] | None = None,
    formats: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    attach: bool = True,
    require: str = "any",
    idempotency_key: str = "",
    timeout_s: float = 30.0,
) -> Capture:
    """Begins a capture of the selected processes, on all hosts at one time, and returns once it is under way.

    selection: which processes; at least one condition, or a place that selects by itself. hosts: by name, host:port or
    unix:/path; slurm_job: the processes of this job on its nodes; at: other places, from wherever they are known; none
    of these: the daemon at `address`. host_address: from a host's name to its daemon's address. iterations: so many
    instead of duration_s. start_at_s: Unix time. options: the fields of pb.Options by name, like record_shapes.
    attach: whether agents may be brought into processes that have none.
    require: "all", "quorum" or "any" of the hosts must be ready, else nothing begins. The other arguments are the
    options of `kinetoctl trace`.

    Raises UsageProblem; Refused if nothing could begin, or the error of the only host.
    """
    where = [*_named(hosts, host_address, slurm_job), *at] or [Place(platform.node(), address or rpc_address())]
    if not selection and not all(place.selects for place in where):
        raise UsageProblem("which processes? A selection has at least one condition")
    if require not in REQUIREMENTS:
        raise UsageProblem(f"require: expected {', '.join(REQUIREMENTS)}, got {require!r}")
    given: dict[str, Any] = dict(options or {})
    try:
        recording = pb.Options(**given)
    except (TypeError, ValueError) as exc:
        raise UsageProblem(f"options: {exc}") from exc
    spec = pb.CaptureSpec(
        selector=selection.to_proto(),
        start_time_ns=int((start_at_s or 0) * SECOND_NS),
        activity_types=activities,
        options=recording,
        formats=formats,
        labels=labels or {},
        no_attach=not attach,
    )
    if iterations is None:
        spec.duration_ns = int(duration_s * SECOND_NS)
        spec.warmup_ns = WARMUP_NS if warmup_s is None else int(warmup_s * SECOND_NS)
    else:
        spec.iterations.count = iterations
    request = FleetRequest(
        id=idempotency_key or new_id(), places=where, spec=spec, require=require, timeout_s=timeout_s
    )
    fleet = request.new_fleet()
    run = FleetRun(request, fleet, FleetQuiet())
    run_fleet(run, run.begin)
    _check_begun(fleet)
    return Capture(request, fleet)


def _named(hosts: Sequence[str], host_address: str | None, slurm_job: str) -> list[Place]:
    try:
        job = parse_slurm_job(slurm_job) if slurm_job else None
        options = PlaceOptions(hosts=tuple(hosts), host_address=host_address, slurm_job=job)
        return places(options, lambda _note: None)
    except ValueError as exc:
        raise UsageProblem(str(exc)) from exc


def _check_begun(fleet: Fleet) -> None:
    """Raises the error that says why nothing has begun."""
    if fleet.interrupted:
        raise KeyboardInterrupt
    failed: list[CliError] = [member.error for member in fleet.members if member.error is not None]
    if any(member.started for member in fleet.members):
        return
    if len(fleet.members) == 1 and failed:
        raise failed[0]
    raise Refused(f"{fleet.unmet or 'nothing began'}: {_why(fleet)}")


def _why(fleet: Fleet) -> str:
    """Of hosts and processes, the first few."""
    reasons = [f"{member.place.host}: {member.error}" for member in fleet.failed()]
    reasons += [
        f"{member.place.host} {enum_names.target(t)}: {t.reason}" for member, t in fleet.processes() if t.reason
    ]
    return "; ".join(reasons[:4]) + ("; …" if len(reasons) > 4 else "")


def _processes(fleet: Fleet) -> list[Process]:
    found = []
    for member, target in fleet.processes():
        lost = member.is_lost(target)
        own = target.pid, target.start_time_ns
        found.append(
            Process(
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


def _uncertainty_ns(made: MergedFile) -> int | None:
    return made.merged.alignment.uncertainty_ns
