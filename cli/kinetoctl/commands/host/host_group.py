"""`kinetoctl host`."""

from typing import TYPE_CHECKING

import click
from kineto_protos.units import format_duration

from kinetoctl.base.common_options import common_options, current
from kinetoctl.base.lazy_import import LazyGroup
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import Unsupported
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output import units
from kinetoctl.output.console import print_table
from kinetoctl.output.diagnosis import host_verdict, print_checks
from kinetoctl.output.json_yaml import emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


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
        ("buffer limit", f"{units.size(host.default_buffer_limit_bytes)} per target"),
    ]


def _diagnosis(client: Client) -> "pb.HostDiagnosis | None":
    """The checks of the host, or None if the daemon is too old for this call."""
    try:
        return client.diagnose_host()
    except Unsupported:
        return None


COMMANDS = {
    "install": "kinetoctl.commands.host.install",
    "uninstall": "kinetoctl.commands.host.uninstall",
}


@click.group("host", cls=LazyGroup, modules=COMMANDS, invoke_without_command=True)
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
