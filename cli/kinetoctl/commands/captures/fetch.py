"""`kinetoctl captures fetch`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.host_run import Fleet
from kinetoctl.client.fleet.lookup import find_fleet
from kinetoctl.client.fleet.workflow import bring, merge_files
from kinetoctl.client.tracing import Outcome, fetch_files, has_ended
from kinetoctl.errors import NotFound, Refused
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.capture_arguments import capture_argument
from kinetoctl.options.host_options import named_places, place_options
from kinetoctl.options.output_dir import FOLDER, prepare_folder
from kinetoctl.options.selection_options import MAX_PID
from kinetoctl.output.capture_progress import show_progress
from kinetoctl.output.capture_result import show_capture
from kinetoctl.output.fleet_progress import show_fleet
from kinetoctl.output.fleet_summary import note_merged, show_fleet_result

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


def _check(capture: "pb.Capture", pid: int, file_format: str) -> None:
    """Raises the error that says why there is nothing to fetch."""
    targets = [target for target in capture.targets if pid in (0, target.pid)]
    if not targets:
        raise NotFound(f"capture {capture.id} has no target with pid {pid}")
    formats = {file.format for target in targets for file in target.files}
    if not formats and not has_ended(capture):
        raise Refused(f"capture {capture.id} is still running; `kinetoctl captures show {capture.id}` shows its state")
    if not formats:
        raise NotFound(f"capture {capture.id} has no file; `kinetoctl captures show {capture.id}` says why")
    if file_format and file_format not in formats:
        raise NotFound(f"capture {capture.id} has no file of format {file_format}, only {', '.join(sorted(formats))}")


def _check_formats(fleet: Fleet, file_format: str) -> None:
    """Raises the error that says why there is nothing to fetch."""
    formats = {file.format for rank in fleet.processes() for file in rank.target.files}
    if not formats:
        raise NotFound(f"capture {fleet.id} has no file; `kinetoctl captures show {fleet.id}` says why")
    if file_format and file_format not in formats:
        raise NotFound(f"capture {fleet.id} has no file of format {file_format}, only {', '.join(sorted(formats))}")


def _fetch_fleet(fleet: Fleet, directory: Path, settings: CommonOptions, *, file_format: str, merge: bool) -> ExitCode:
    """Fetch the files of an earlier capture and print the result. DONE only if all files are here."""
    merged = None
    with show_fleet(fleet.members, quiet=settings.quiet, color=settings.color) as progress:
        folder = bring(fleet, directory, progress, timeout_s=settings.timeout_s, file_format=file_format)
        if merge and folder is not None:
            merged = merge_files(fleet, directory, progress)
            note_merged(merged, progress)
    show_fleet_result(fleet, folder, merged, settings)
    problems = [
        *fleet.problems,
        *(each for member in fleet.members for each in (*member.problems, member.error) if each),
    ]
    if not problems:
        return ExitCode.DONE
    return ExitCode.PARTIAL if any(member.paths for member in fleet.members) else problems[0].exit_code


@click.command("fetch")
@capture_argument
@click.option(
    "--pid", type=click.IntRange(1, MAX_PID), metavar="PID", default=None, help="Only the files of this process."
)
@click.option("--format", "file_format", metavar="NAME", default="", help="Only files of this format.  [default: all]")
@click.option("--output-dir", type=FOLDER, default=Path(), help="Folder for the files.  [default: .]")
@click.option("--no-merge", is_flag=True, help="With several hosts: do not merge the traces into one.")
@place_options
@common_options
def command(capture_id: str, pid: int | None, file_format: str, output_dir: Path, no_merge: bool, **hosts: Any) -> int:
    """Download the files of a capture and verify them.

    An interrupted download continues where it stopped. Existing files are not overwritten. The exit code is 0 only
    if every file was downloaded and verified. With several hosts, ID is the one that `kinetoctl trace` printed for
    the whole capture, and the traces are also merged into one.
    """
    settings = current()
    if places := named_places(hosts):
        if pid is not None:
            raise click.UsageError("--pid needs a single host: name that host alone, and the capture by its id there")
        fleet = find_fleet(places, capture_id, timeout_s=settings.timeout_s)
        _check_formats(fleet, file_format)
        return _fetch_fleet(fleet, prepare_folder(output_dir), settings, file_format=file_format, merge=not no_merge)
    if no_merge:
        raise click.UsageError("--no-merge needs several hosts: name them with --host, --hosts, --slurm-job or --kube")
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        outcome = Outcome(client.capture(capture_id))
        _check(outcome.capture, pid or 0, file_format)
        folder = prepare_folder(output_dir)
        with show_progress(quiet=settings.quiet, color=settings.color) as progress:
            progress.update(outcome.capture)
            fetch_files(client, outcome, folder, progress, pid=pid or 0, file_format=file_format)
    show_capture(outcome.capture, outcome.paths, settings)
    if outcome.problems:
        return ExitCode.PARTIAL if outcome.paths else outcome.problems[0].exit_code
    return ExitCode.DONE
