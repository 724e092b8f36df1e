"""After a capture of many hosts: fetch its files and merge them into one trace."""

import secrets
import time
from datetime import UTC, datetime
from pathlib import Path

from kinetoctl.client.file_errors import trace_errors, write_errors
from kinetoctl.client.fleet.fleet_files import MergedFile, fetch_all, folder_of, merge_all
from kinetoctl.client.fleet.host_run import Fleet, FleetProgress
from kinetoctl.errors import CliError, TraceUnreadable


def new_id(now_ns: int | None = None) -> str:
    """A new id that sorts by time: 20260131-235959-9f86d0."""
    when = datetime.fromtimestamp((time.time_ns() if now_ns is None else now_ns) // 10**9, UTC)
    return f"{when:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def bring(
    fleet: Fleet, directory: Path, progress: FleetProgress, *, timeout_s: float, file_format: str = ""
) -> Path | None:
    """Download the files. Returns their folder, or None if there are no files. Failures are recorded in the fleet."""
    if not any(target.files for _, target in fleet.processes()):
        return None
    folder = folder_of(fleet, directory)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    fetch_all(fleet, folder, progress, timeout_s=timeout_s, file_format=file_format)
    return folder


def merge_files(fleet: Fleet, directory: Path, progress: FleetProgress) -> MergedFile | None:
    """Merge the traces into one. Returns None if there is no trace, or if merging fails, which the fleet records."""
    progress.note("merging")
    try:
        with trace_errors(), write_errors(directory):
            return merge_all(fleet, directory)
    except CliError as exc:
        fleet.problems.append(TraceUnreadable(f"the traces could not be merged: {exc}"))
        return None
