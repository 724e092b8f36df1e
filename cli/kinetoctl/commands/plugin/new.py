"""`kinetoctl plugin new`."""

from pathlib import Path

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.exit_codes import ExitCode
from kinetoctl.local.plugin_project import write_project
from kinetoctl.output.console import say
from kinetoctl.output.json_yaml import emit


@click.command("new")
@click.argument("name")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Folder in which the project's folder is made.  [default: .]",
)
@common_options
def command(name: str, output_dir: Path) -> int:
    """Write the project of a new plug-in into the folder kinetod-NAME.

    It can be installed as it is: it records one activity, and says where the accelerator's own come in. NAME is that of
    the accelerator: 2 to 16 lower-case letters and digits. Nothing that exists is overwritten.
    """
    settings = current()
    project = write_project(name, output_dir)
    if settings.output != "table":
        emit({"name": name, "path": str(project.folder), "files": project.files}, settings.output)
        return ExitCode.DONE
    for file in project.files:
        say(str(project.folder / file))
    say(f"`kinetoctl plugin check {project.folder}` says whether kinetod would take it.", err=True)
    return ExitCode.DONE
