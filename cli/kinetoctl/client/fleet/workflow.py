"""The whole way of a capture of many hosts: take it, bring its files here, make one of them, print what came of it."""

import secrets
import time
from datetime import UTC, datetime
from pathlib import Path

from kinetoctl.base.common_options import Settings
from kinetoctl.client.file_errors import trace_errors, write_errors
from kinetoctl.client.fleet.event_loop import run_fleet
from kinetoctl.client.fleet.fleet_files import MergedFile, check_promises, fetch_all, folder_of, merge_all
from kinetoctl.client.fleet.fleet_run import FleetRequest, FleetRun
from kinetoctl.client.fleet.host_run import Fleet, FleetProgress
from kinetoctl.errors import CliError, TraceUnreadable
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.fleet_progress import show_fleet
from kinetoctl.output.fleet_summary import merged_text, show_fleet_result


def new_id(now_ns: int | None = None) -> str:
    """Sorts by time: 20260131-235959-9f86d0."""
    when = datetime.fromtimestamp((time.time_ns() if now_ns is None else now_ns) // 10**9, UTC)
    return f"{when:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def trace_fleet(request: FleetRequest, directory: Path | None, settings: Settings, *, merge: bool) -> Fleet:
    """Runs it and prints the result. directory: None: the files stay in the daemons' stores.

    Raises UsageProblem for a start that is too near. KeyboardInterrupt leaves at once.
    """
    fleet = request.new_fleet()
    folder, merged = None, None
    with show_fleet(fleet.members, quiet=settings.quiet, color=settings.color) as progress:
        progress.note(f"capture {fleet.id} on {len(fleet.members):,} hosts")
        run = FleetRun(request, fleet, progress)
        run_fleet(run, run.begin, run.finish)
        check_promises(fleet)
        if directory is not None and not fleet.interrupted and not fleet.unmet:
            folder = bring(fleet, directory, progress, timeout_s=settings.timeout_s)
            if merge and folder is not None:
                merged = merge_files(fleet, directory, progress)
    show_fleet_result(fleet, folder, merged, settings)
    return fleet


def fetch_fleet(fleet: Fleet, directory: Path, settings: Settings, *, file_format: str, merge: bool) -> ExitCode:
    """Brings the files of a capture that was taken before, and prints it. 0 only if all are here."""
    merged = None
    with show_fleet(fleet.members, quiet=settings.quiet, color=settings.color) as progress:
        folder = bring(fleet, directory, progress, timeout_s=settings.timeout_s, file_format=file_format)
        if merge and folder is not None:
            merged = merge_files(fleet, directory, progress)
    show_fleet_result(fleet, folder, merged, settings)
    problems = [
        *fleet.problems,
        *(each for member in fleet.members for each in (*member.problems, member.error) if each),
    ]
    if not problems:
        return ExitCode.DONE
    return ExitCode.PARTIAL if any(member.paths for member in fleet.members) else problems[0].exit_code


def bring(
    fleet: Fleet, directory: Path, progress: FleetProgress, *, timeout_s: float, file_format: str = ""
) -> Path | None:
    """The folder with the files; None: there are none. What went wrong is in the fleet."""
    if not any(target.files for _, target in fleet.processes()):
        return None
    folder = folder_of(fleet, directory)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    fetch_all(fleet, folder, progress, timeout_s=timeout_s, file_format=file_format)
    return folder


def merge_files(fleet: Fleet, directory: Path, progress: FleetProgress) -> MergedFile | None:
    """One trace of all; None: there is none. A failure is noted: the files of the processes are there all the same."""
    progress.note("merging")
    try:
        with trace_errors(), write_errors(directory):
            result = merge_all(fleet, directory)
    except CliError as exc:
        fleet.problems.append(TraceUnreadable(f"the traces could not be merged: {exc}"))
        return None
    if result is not None:
        progress.note(f"merged: {merged_text(result)}")
        for note in result.merged.written.notes:
            progress.note(f"note: {note}")
        if result.renumbered:
            progress.note("note: the processes have no ranks that tell them apart; they are numbered in their order")
    return result
