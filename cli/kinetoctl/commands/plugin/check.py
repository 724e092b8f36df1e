"""`kinetoctl plugin check`."""

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.base.lazy_import import completed
from kinetoctl.errors import PluginRefused
from kinetoctl.exit_codes import ExitCode
from kinetoctl.local.plugin_check import CheckedPlugin, check_plugin
from kinetoctl.output.console import print_table, say
from kinetoctl.output.json_yaml import emit


@click.command("check")
@click.argument("plugin", metavar="NAME|FOLDER", shell_complete=completed("plugins"))
@common_options
def command(plugin: str) -> int:
    """Load a plug-in as kinetod would, and say what is wrong with it.

    NAME is an installed plug-in, FOLDER the project of one, which need not be installed. It is loaded in a process of
    its own on this machine, with your rights; no daemon is asked, and no other process is touched. The exit code is 5
    if kinetod would not take it.
    """
    settings = current()
    checked = check_plugin(plugin)
    if checked.refused:
        if settings.output != "table":
            emit(checked.plain(), settings.output)
        raise PluginRefused(f"{plugin}: {checked.refused}")
    if settings.output == "table":
        print_table(("NAME", "VALUE"), _rows(checked), color=settings.color)
        for note in checked.notes:
            say(f"note: {note}", err=True)
    else:
        emit(checked.plain(), settings.output)
    return ExitCode.DONE


def _rows(checked: CheckedPlugin) -> list[tuple[str, str]]:
    return [
        ("plug-in", checked.name),
        ("package", f"{checked.package} {checked.version}".strip() or "-"),
        ("activity types", ", ".join(checked.activity_types)),
        *((f"sign: {kind}", ", ".join(patterns)) for kind, patterns in checked.signs.items()),
        ("conflicts", ", ".join(checked.conflicts) or "-"),
        ("needs from start", checked.needs_from_start or "-"),
        ("detach", checked.detach),
        ("files", ", ".join(checked.files)),
    ]
