"""The options that name hosts, shared by the commands that can ask many of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from kineto_protos import endpoints

from kinetoctl.base.common_options import current
from kinetoctl.base.lazy_import import parsed
from kinetoctl.client.hosts.host_defaults import DEFAULT_TEMPLATE, KINETOD_NAMESPACE
from kinetoctl.output.console import say

if TYPE_CHECKING:
    from kinetoctl.client.hosts.host_targets import Place

F = TypeVar("F", bound=Callable[..., Any])
TEMPLATE = parsed("address", "kinetoctl.client.hosts.host_targets:parse_template")
SLURM_JOB = parsed("job", "kinetoctl.client.hosts.slurm:parse_slurm_job")
KUBE = parsed("pod", "kinetoctl.client.hosts.kube:parse_kube")

_HOST_OPTIONS = (
    click.option(
        "--host",
        "hosts",
        metavar="HOST",
        multiple=True,
        help="Host to ask instead of --address: a name, host:port or unix:/path; repeatable.",
    ),
    click.option(
        "--hosts",
        "lists",
        metavar="FILE|A,B,C",
        multiple=True,
        help="List of hosts, or file (FILE, @FILE) with a `name` or `name address` on each line; # starts a comment.",
    ),
    click.option(
        "--slurm-job",
        metavar="JOB[_TASK][+HET][.STEP]",
        type=SLURM_JOB,
        help="Processes of a Slurm job, on all its nodes or on those that --host and --hosts name.",
    ),
    click.option(
        "--host-address",
        metavar="TEMPLATE",
        type=TEMPLATE,
        help="Template of a daemon's address, such as unix:/run/{host}.sock; {address} is its address in Slurm.  "
        f"[env: {endpoints.HOST_ADDRESS_VARIABLE}; default: {DEFAULT_TEMPLATE}]",
    ),
)
_KUBE_OPTIONS = (
    click.option(
        "--kube",
        metavar="NAMESPACE[/POD]",
        type=KUBE,
        multiple=True,
        help="Processes of a pod, or, with -l, of a namespace's pods; repeatable.",
    ),
    click.option(
        "-l", "--selector", "kube_selector", metavar="LABELS", help="Label selector for pods, in kubectl's syntax."
    ),
    click.option("--kube-context", metavar="NAME", help="Context in the kubeconfig.  [default: the current one]"),
    click.option("--kubeconfig", metavar="FILE", help="Kubeconfig file.  [env: KUBECONFIG]"),
    click.option(
        "--kinetod-namespace", metavar="NAME", help=f"Namespace of kinetod's DaemonSet.  [default: {KINETOD_NAMESPACE}]"
    ),
)
_OPTIONS = (*_HOST_OPTIONS, *_KUBE_OPTIONS)
PLACE_OPTIONS = (  # the parameters of a command that name hosts: the fields of PlaceOptions
    *("hosts", "lists", "host_address", "slurm_job"),
    *("kube", "kube_selector", "kube_context", "kubeconfig", "kinetod_namespace"),
)


def place_options(function: F) -> F:
    """Adds --host, --hosts, --slurm-job, --kube and what goes with them.

    A command takes their values out with `named_places`.
    """
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def named_places(values: dict[str, Any]) -> "list[Place]":
    """The hosts that the options name, which are taken out of a command's values; none: ask --address.

    Raises UsageError, CliError.
    """
    given = {name: values.pop(name) for name in PLACE_OPTIONS}
    if not any(given.values()):
        return []
    from kinetoctl.client.hosts.host_targets import PlaceOptions, places
    from kinetoctl.client.hosts.kube import TUNNELS  # 30 ms, with what they import, that one host does not need

    settings = current()
    click.get_current_context().call_on_close(TUNNELS.close)
    options = PlaceOptions(**given)
    try:
        return places(options, lambda note: None if settings.quiet else say(note, err=True))
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
