"""`kinetoctl captures`: stored and running captures."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, LazyGroup, common_options, completed, current
from kinetoctl.base.value_types import FOLDER, LABEL, prepare_folder
from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client, Patience
from kinetoctl.client.fleet.fleet_files import bring, find_answer, merge_files
from kinetoctl.client.fleet.host_client import find_fleet
from kinetoctl.client.fleet.host_run import Fleet
from kinetoctl.client.tracing import Outcome, fetch_files, follow, has_ended
from kinetoctl.errors import NotFound, Refused
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.selection_options import MAX_PID, named_places, place_options
from kinetoctl.output import units
from kinetoctl.output.capture_progress import show_fleet, show_progress
from kinetoctl.output.capture_summary import note_merged, show_capture, show_fleet_result
from kinetoctl.output.console import emit, plain, print_table, say
from kinetoctl.output.listing import CAPTURES, listing_options, show_list

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

Checked = tuple[str, "pb.FileCheck"]
COLUMNS = ("CAPTURE", "PID", "FILE", "COPY", "SIZE", "RESULT")  # of files that were verified


@click.group("captures", cls=LazyGroup)
@common_options
def command() -> None:
    """List, show, fetch, cancel, pin, verify and delete captures."""


_IDS = completed("capture_ids")
capture_argument = click.argument("capture_id", metavar="ID", shell_complete=_IDS)
some_captures_argument = click.argument("capture_ids", metavar="[ID]...", nargs=-1, shell_complete=_IDS)
captures_argument = click.argument("capture_ids", metavar="ID...", nargs=-1, required=True, shell_complete=_IDS)


@command.command("list")
@click.option(
    "--label",
    "labels",
    type=LABEL,
    multiple=True,
    help="Only captures with this label, for example team=vision; repeatable.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=20,
    metavar="N",
    help="How many captures to list per host, newest first.  [default: 20]",
)
@listing_options(CAPTURES.orders, "newest first, host by host")
@place_options
@common_options
def list_captures(labels: tuple[tuple[str, str], ...], limit: int, **values: Any) -> int:
    """List captures, newest first; with several hosts, host by host.

    `kinetoctl captures show ID` shows one, `kinetoctl captures fetch ID` downloads its files.
    """
    settings = current()
    _, code = show_list(
        CAPTURES,
        named_places(values),
        settings,
        lambda client: client.captures(dict(labels), limit=limit),
        lambda client, _place: client.captures(dict(labels), limit=limit),
        lambda place: {"address": place.address},
        **values,
    )
    return code


def _follow(client: Client, capture: "pb.Capture", settings: CommonOptions) -> None:
    """Brings the capture up to date until it has ended, and shows its progress. Ctrl-C ends only the watching."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        show_progress(quiet=settings.quiet, color=settings.color) as progress,
    ):
        progress.update(capture)
        for _change in follow(client, capture, Patience(settings.timeout_s)):
            progress.update(capture)


@command.command("show")
@capture_argument
@click.option("--watch", "-w", "watches", is_flag=True, help="Follow the capture until it has ended, then show it.")
@place_options
@common_options
def show_capture_of(capture_id: str, watches: bool, **hosts: Any) -> int:
    """Show one capture: its processes, their verdicts and what was recorded.

    With several hosts, ID is the one that `kinetoctl trace` printed for the whole capture.
    """
    settings = current()
    if places := named_places(hosts):
        if watches:
            raise click.UsageError("--watch follows a capture on a single host: name that host with --address")
        fleet = find_fleet(places, capture_id, timeout_s=settings.timeout_s)
        show_fleet_result(fleet, None, None, settings)
        return ExitCode.DONE
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        capture = client.capture(capture_id)
        if watches:
            _follow(client, capture, settings)
        show_capture(capture, {}, settings)
    return ExitCode.DONE


def _check(capture_id: str, targets: "Sequence[pb.Target]", file_format: str, *, runs: bool = False) -> None:
    """Raises the error that says why there is nothing to fetch. runs: whether the capture has not ended."""
    formats = {file.format for target in targets for file in target.files}
    if not formats and runs:
        raise Refused(f"capture {capture_id} is still running; `kinetoctl captures show {capture_id}` shows its state")
    if not formats:
        raise NotFound(f"capture {capture_id} has no files; `kinetoctl captures show {capture_id}` shows why")
    if file_format and file_format not in formats:
        raise NotFound(f"capture {capture_id} has no file in format {file_format}, only {', '.join(sorted(formats))}")


def _fetch_fleet(fleet: Fleet, directory: Path, settings: CommonOptions, *, file_format: str, merge: bool) -> ExitCode:
    """Fetch the files of an earlier capture and print the result. DONE only if all files are here."""
    merged = None
    with show_fleet(fleet.members, quiet=settings.quiet, color=settings.color) as progress:
        folder = bring(fleet, directory, progress, timeout_s=settings.timeout_s, file_format=file_format)
        if merge and folder is not None:
            merged = merge_files(fleet, directory, progress)
            note_merged(merged, progress)
        find_answer(fleet, progress)
    show_fleet_result(fleet, folder, merged, settings)
    if fleet.interrupted:
        return ExitCode.INTERRUPTED
    problems = [*fleet.all_problems(), *(member.error for member in fleet.members if member.error)]
    if not problems:
        return ExitCode.DONE
    return ExitCode.PARTIAL if any(member.paths for member in fleet.members) else problems[0].exit_code


@command.command("fetch")
@capture_argument
@click.option(
    "--pid", type=click.IntRange(1, MAX_PID), metavar="PID", default=None, help="Only the files of this process."
)
@click.option("--format", "file_format", metavar="NAME", default="", help="Only files of this format.  [default: all]")
@click.option("--output-dir", type=FOLDER, default=Path(), help="Folder for the files.  [default: .]")
@click.option("--no-merge", is_flag=True, help="With several hosts: do not merge the traces into one.")
@place_options
@common_options
def fetch(capture_id: str, pid: int | None, file_format: str, output_dir: Path, no_merge: bool, **hosts: Any) -> int:
    """Download the files of a capture and verify them.

    An interrupted download continues where it stopped. Existing files are not overwritten. The exit code is 0 only
    if every file was downloaded and verified. With several hosts, ID is the one that `kinetoctl trace` printed for
    the whole capture, and the traces are also merged into one.
    """
    settings = current()
    if places := named_places(hosts):
        if pid is not None:
            raise click.UsageError(
                "--pid works with a single host only: name only that host, and use the id of the capture there"
            )
        fleet = find_fleet(places, capture_id, timeout_s=settings.timeout_s)
        _check(fleet.id, [rank.target for rank in fleet.processes()], file_format)
        return _fetch_fleet(fleet, prepare_folder(output_dir), settings, file_format=file_format, merge=not no_merge)
    if no_merge:
        raise click.UsageError("--no-merge needs several hosts: name them with --host, --hosts, --slurm-job or --kube")
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        outcome = Outcome(client.capture(capture_id))
        targets = [target for target in outcome.capture.targets if pid in (None, target.pid)]
        if not targets:
            raise NotFound(f"capture {capture_id} has no process{'es' if pid is None else f' with pid {pid}'}")
        _check(capture_id, targets, file_format, runs=not has_ended(outcome.capture))
        folder = prepare_folder(output_dir)
        with show_progress(quiet=settings.quiet, color=settings.color) as progress:
            progress.update(outcome.capture)
            fetch_files(client, outcome, folder, progress, pid=pid or 0, file_format=file_format)
    show_capture(outcome.capture, outcome.paths, settings, outcome.problems)
    if outcome.problems:
        return ExitCode.PARTIAL if outcome.paths else outcome.problems[0].exit_code
    return ExitCode.DONE


@command.command("cancel")
@captures_argument
@click.option("--keep-partial", is_flag=True, help="Store what has been recorded so far.")
@common_options
def cancel(capture_ids: tuple[str, ...], keep_partial: bool) -> int:
    """Stop running captures in all their processes."""
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        captures = [client.cancel(capture_id, keep_partial=keep_partial) for capture_id in capture_ids]
    if settings.output == "table":
        for capture in captures:
            say(f"{capture.id} {enum_names.capture_status(capture.status)}")
    else:
        emit([plain(capture) for capture in captures], settings.output)
    return ExitCode.DONE


def _each(capture_ids: Sequence[str], word: str, act: Callable[[Client, str], None]) -> ExitCode:
    """Does that with each capture, and says so with this word."""
    settings = current()
    done = []
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        for capture_id in capture_ids:
            act(client, capture_id)
            done.append(capture_id)
            if settings.output == "table":
                say(f"{capture_id} {word}")
    if settings.output != "table":
        emit({word: done}, settings.output)
    return ExitCode.DONE


@command.command("pin")
@captures_argument
@common_options
def pin(capture_ids: tuple[str, ...]) -> int:
    """Protect captures from retention and `captures delete`."""
    return _each(capture_ids, "pinned", lambda client, capture_id: client.pin(capture_id, pinned=True))


@command.command("unpin")
@captures_argument
@common_options
def unpin(capture_ids: tuple[str, ...]) -> int:
    """Remove the protection set by `captures pin`."""
    return _each(capture_ids, "unpinned", lambda client, capture_id: client.pin(capture_id, pinned=False))


def _row(capture_id: str, check: "pb.FileCheck") -> tuple[str, ...]:
    copy = "uploaded" if check.uploaded else "local"
    name = check.format or check.name
    result = f"DAMAGED: {check.problem}" if check.problem else "OK"
    return capture_id, str(check.pid or "-"), name, copy, units.size(check.size_bytes), result


def _checks(client: Client, capture_ids: tuple[str, ...], uploaded: bool) -> Iterator[Checked]:
    ended = (each.id for each in client.captures({}, limit=sys.maxsize) if each.ended_ns)
    for capture_id in capture_ids or ended:
        try:
            for check in client.verify(capture_id, uploaded=uploaded):
                yield capture_id, check
        except NotFound:
            if capture_ids:
                raise  # else retention was faster


def _show(checked: list[Checked], settings: CommonOptions) -> None:
    if settings.output == "table":
        print_table(COLUMNS, [_row(capture_id, check) for capture_id, check in checked], color=settings.color)
    else:
        emit([{"capture_id": capture_id, **plain(check)} for capture_id, check in checked], settings.output)


@command.command("verify")
@some_captures_argument
@click.option("--uploaded", is_flag=True, help="Also verify the uploaded copies of files that are still on the host.")
@common_options
def verify(capture_ids: tuple[str, ...], uploaded: bool) -> int:
    """Verify the size and SHA-256 of stored files.

    Without ID, it verifies the files of all ended captures. The exit code is 5 if a file is damaged.
    """
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        checked = list(_checks(client, capture_ids, uploaded))
    _show(checked, settings)
    return ExitCode.FAILED if any(check.problem for _, check in checked) else ExitCode.DONE


@command.command("delete")
@captures_argument
@click.option("--keep-uploaded", is_flag=True, help="Do not delete uploaded files.")
@common_options
def delete(capture_ids: tuple[str, ...], keep_uploaded: bool) -> int:
    """Delete ended captures and their files, including the uploaded ones."""
    return _each(
        capture_ids, "deleted", lambda client, capture_id: client.delete(capture_id, keep_uploaded=keep_uploaded)
    )
