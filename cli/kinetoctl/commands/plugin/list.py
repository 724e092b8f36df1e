"""`kinetoctl plugin list`."""

from typing import TYPE_CHECKING

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import print_table, say
from kinetoctl.output.json_yaml import emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

COLUMNS = ("NAME", "STATE", "VERSION", "PACKAGE", "ACTIVITY TYPES, OR WHY NOT")
_OFF = "not in plugins.sources of kinetod's configuration"


@click.command("list")
@common_options
def command() -> int:
    """List the plug-ins that are installed beside the daemon.

    State: on (agents get it), off (installed, but not in the configuration), or refused (in the configuration, but not
    used). All as they were when the daemon started.
    """
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        plugins = list(client.host().plugins)
    if settings.output != "table":
        emit([plain(plugin) for plugin in plugins], settings.output)
        return ExitCode.DONE
    print_table(COLUMNS, [_row(plugin) for plugin in plugins], color=settings.color)
    if not plugins:
        say("No plug-in is installed beside the daemon. `kinetoctl plugin new NAME` writes one.", err=True)
    return ExitCode.DONE


def _row(plugin: "pb.Plugin") -> tuple[str, ...]:
    state = enum_names.plugin_state(plugin.state).lower()
    what = plugin.reason or ", ".join(plugin.activity_types) or _OFF
    return (plugin.name, state, plugin.version or "-", plugin.package or "-", what)
