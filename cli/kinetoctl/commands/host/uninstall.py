"""`kinetoctl host uninstall`."""

from pathlib import Path

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.commands.host.install import report, shared_options, what_and_where
from kinetoctl.exit_codes import ExitCode
from kinetoctl.installation import plan
from kinetoctl.installation.steps import carry_out
from kinetoctl.output.console import say


@click.command("uninstall")
@shared_options
@click.option("--purge", is_flag=True, help="Delete captures, configuration and users too.")
@common_options
def command(dry_run: bool, root: Path, for_package: str | None, purge: bool) -> int:
    """Remove the service from this host. Captures and configuration are kept unless --purge is given.

    Running captures end with what has been recorded. The programs themselves are not removed.
    """
    host, layout, parts = what_and_where(root, for_package, dry_run=dry_run)
    done = carry_out(plan.uninstall(layout, parts, purge=purge), host, dry_run=dry_run)
    report(done, dry_run=dry_run, nothing="nothing to do: kinetod is not installed")
    if not purge and not current().quiet:
        for path in plan.kept(host):
            say(f"kept: {path}/ (--purge deletes it)", err=True)
    return ExitCode.DONE
