"""`kinetoctl host`: show the daemon's host, and install or uninstall kinetod on it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from kineto_trace.base.quantities import format_duration

from kinetoctl import installation
from kinetoctl.base.common_options import LazyGroup, common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import NotInstalled, Unsupported, UsageProblem
from kinetoctl.exit_codes import ExitCode
from kinetoctl.installation import ADMINISTRATORS, PACKAGES, FileLayout, Host, InstallPart, carry_out
from kinetoctl.output import units
from kinetoctl.output.console import emit, plain, print_table, say
from kinetoctl.output.diagnosis import host_verdict, print_checks

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])
ROOT = click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True)
_PARTS = {"files": InstallPart.FILES, "setup": InstallPart.SETUP}


def _gpu_rows(host: "pb.Host") -> list[tuple[str, str]]:
    if not host.gpus:
        return [("GPUs", f"none ({host.gpu_note})" if host.gpu_note else "none")]
    rows = [(f"GPU {gpu.index}", f"{gpu.name}, {units.size(gpu.memory_bytes)}, {gpu.uuid}") for gpu in host.gpus]
    return [*rows, ("driver", host.driver_version or "-")]


def _rows(host: "pb.Host") -> list[tuple[str, str]]:
    return [
        ("host", host.hostname),
        ("kinetod", f"{host.version}, up {format_duration(host.now_ns - host.started_ns)}"),
        *_gpu_rows(host),
        ("agents", str(host.agents)),
        ("captures running", str(host.captures_running)),
        ("store", host.store_path),
        ("store used / free", f"{units.size(host.store_used_bytes)} / {units.size(host.store_free_bytes)}"),
        ("agent socket", host.agent_socket),
        ("longest trace", format_duration(host.max_duration_ns)),
        ("buffer limit", f"{units.size(host.default_buffer_limit_bytes)} per process"),
    ]


def _diagnosis(client: Client) -> "pb.HostDiagnosis | None":
    """The checks of the host, or None if the daemon is too old for this call."""
    try:
        return client.diagnose_host()
    except Unsupported:
        return None


@click.group("host", cls=LazyGroup, invoke_without_command=True)
@common_options
@click.pass_context
def command(context: click.Context) -> int:
    """Show the daemon's host: versions, GPUs, store, limits and checks. Or install kinetod on this host."""
    if context.invoked_subcommand is not None:
        return ExitCode.DONE
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        host = client.host()
        diagnosis = _diagnosis(client)
    if settings.output == "table":
        print_table(("NAME", "VALUE"), _rows(host), color=settings.color)
        if diagnosis is not None:
            print_checks("", diagnosis.checks, host_verdict(diagnosis), color=settings.color)
    else:
        checks = [] if diagnosis is None else plain(diagnosis)["checks"]
        emit({**plain(host), "checks": checks}, settings.output)
    return ExitCode.DONE


def _shared_options(function: F) -> F:
    """Adds the options that installing and uninstalling share."""
    options = (
        click.option("--dry-run", is_flag=True, help="Show what would be done without doing it."),
        click.option("--root", type=ROOT, default=Path("/"), help="Image or chroot to change instead of this host."),
        click.option(
            "--for-package",
            type=click.Choice(list(_PARTS)),
            help="For packages only: install the packaged files, or do what the package's scripts do.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _what_and_where(root: Path, for_package: str | None, *, dry_run: bool) -> tuple[Host, FileLayout, InstallPart]:
    """Raises NotInstalled."""
    host = Host(root)
    if not dry_run and os.geteuid() != 0:
        raise NotInstalled("this needs root; --dry-run shows what would be done")
    if for_package is not None:
        return host, PACKAGES, _PARTS[for_package]
    if installation.of_a_package(host):
        raise NotInstalled("kinetod was installed on this host by a package; use the package manager (apt, dnf)")
    return host, ADMINISTRATORS, InstallPart.ALL


def _report(done: list[str], *, dry_run: bool, nothing: str) -> None:
    """One line for each step, on stdout."""
    settings = current()
    if settings.output != "table":
        emit({"dry_run": dry_run, "steps": done}, settings.output)
        return
    for each in done or [nothing]:
        say(f"would {each}" if dry_run and done else each)


@command.command("install")
@_shared_options
@click.option(
    "--programs",
    type=click.Path(path_type=Path),
    help="Folder with kinetod, kinetod-attach, kinetod-counters and kinetod-writer.  [default: that of this kinetoctl]",
)
@click.option("--no-start", is_flag=True, help="Enable the service without starting it now.")
@common_options
def install(dry_run: bool, root: Path, for_package: str | None, programs: Path | None, no_start: bool) -> int:
    """Install kinetod as a service on this host.

    Creates users, systemd units, a configuration and folders. It is safe to repeat: only what differs is changed, and
    an existing configuration is kept. Run it again after an upgrade of the programs to update the units and start
    the new service.
    """
    host, layout, parts = _what_and_where(root, for_package, dry_run=dry_run)
    programs = programs or installation.own_programs()
    if not programs.is_absolute():
        raise UsageProblem(f"--programs: {str(programs)!r} is not an absolute path")
    if for_package is None:
        installation.check_programs(host, programs)
    os.umask(0o022)  # folders on the way to what is installed are for everybody to read, and root's to write
    if InstallPart.SETUP in parts:
        installation.check_leftovers(host)
    steps = installation.install(layout, parts, programs=programs, start=not no_start)
    _report(
        carry_out(steps, host, dry_run=dry_run),
        dry_run=dry_run,
        nothing="nothing to do: kinetod is installed and up to date",
    )
    return ExitCode.DONE


@command.command("uninstall")
@_shared_options
@click.option("--purge", is_flag=True, help="Delete captures, configuration and users too.")
@common_options
def uninstall(dry_run: bool, root: Path, for_package: str | None, purge: bool) -> int:
    """Remove the service from this host. Captures and configuration are kept unless --purge is given.

    Running captures end and keep what they have recorded. The programs themselves are not removed.
    """
    host, layout, parts = _what_and_where(root, for_package, dry_run=dry_run)
    done = carry_out(installation.uninstall(layout, parts, purge=purge), host, dry_run=dry_run)
    _report(done, dry_run=dry_run, nothing="nothing to do: kinetod is not installed")
    if not purge and not current().quiet:
        for path in installation.kept(host):
            say(f"kept: {path}/ (--purge deletes it)", err=True)
    return ExitCode.DONE
