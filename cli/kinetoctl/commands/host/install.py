"""`kinetoctl host install`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.errors import NotInstalled, UsageProblem
from kinetoctl.exit_codes import ExitCode
from kinetoctl.installation import plan
from kinetoctl.installation.plan import ADMINISTRATORS, PACKAGES, FileLayout, InstallPart
from kinetoctl.installation.steps import Host, carry_out
from kinetoctl.output.console import say
from kinetoctl.output.json_yaml import emit

F = TypeVar("F", bound=Callable[..., Any])
ROOT = click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True)
_PARTS = {"files": InstallPart.FILES, "setup": InstallPart.SETUP}


def shared_options(function: F) -> F:
    """Adds the options that installing and uninstalling share."""
    options = (
        click.option("--dry-run", is_flag=True, help="Show what would be done without doing it."),
        click.option("--root", type=ROOT, default=Path("/"), help="Image or chroot to change instead of this host."),
        click.option(
            "--for-package",
            type=click.Choice(list(_PARTS)),
            help="For packages only: lay down the packaged files, or do what the package's scripts do.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def what_and_where(root: Path, for_package: str | None, *, dry_run: bool) -> tuple[Host, FileLayout, InstallPart]:
    """Raises NotInstalled."""
    host = Host(root)
    if not dry_run and os.geteuid() != 0:
        raise NotInstalled("this needs root; --dry-run shows what would be done")
    if for_package is not None:
        return host, PACKAGES, _PARTS[for_package]
    if plan.of_a_package(host):
        raise NotInstalled("a package has installed kinetod on this host; use the package manager (apt, dnf)")
    return host, ADMINISTRATORS, InstallPart.ALL


def report(done: list[str], *, dry_run: bool, nothing: str) -> None:
    """One line for each step, on stdout."""
    settings = current()
    if settings.output != "table":
        emit({"dry_run": dry_run, "steps": done}, settings.output)
        return
    for each in done or [nothing]:
        say(f"would {each}" if dry_run and done else each)


@click.command("install")
@shared_options
@click.option(
    "--programs",
    type=click.Path(path_type=Path),
    help="Folder of kinetod, kinetod-attach and kinetod-writer.  [default: that of this kinetoctl]",
)
@click.option("--no-start", is_flag=True, help="Enable the service without starting it now.")
@common_options
def command(dry_run: bool, root: Path, for_package: str | None, programs: Path | None, no_start: bool) -> int:
    """Install kinetod as a service on this host.

    It creates users, systemd units, a configuration and folders. It is safe to repeat: only what differs is changed,
    and an existing configuration is kept. After an upgrade of the programs it updates the units and starts the new
    service.
    """
    host, layout, parts = what_and_where(root, for_package, dry_run=dry_run)
    programs = programs or plan.own_programs()
    if not programs.is_absolute():
        raise UsageProblem(f"--programs: {str(programs)!r} is not an absolute path")
    if for_package is None:
        plan.check_programs(host, programs)
    os.umask(0o022)  # folders on the way to what is installed are for everybody to read, and root's to write
    if InstallPart.SETUP in parts:
        plan.check_leftovers(host)
    steps = plan.install(layout, parts, programs=programs, start=not no_start)
    report(
        carry_out(steps, host, dry_run=dry_run),
        dry_run=dry_run,
        nothing="nothing to do: kinetod is installed and up to date",
    )
    return ExitCode.DONE
