"""The options that select processes and name hosts, shared by the commands that do."""

import functools
import re
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click
from kineto_protos import endpoints
from kineto_protos.endpoints import DEFAULT_TEMPLATE, KINETOD_NAMESPACE

from kinetoctl.base.common_options import completed, current, parsed
from kinetoctl.base.value_types import CONTAINER_ID, GPUS, POD_UID, RANKS_OR_ALL, REGEX
from kinetoctl.client.selection import Selection
from kinetoctl.output.console import say

if TYPE_CHECKING:
    from kinetoctl.client.host_targets import Place

R = TypeVar("R")
MAX_PID = 2**22  # the kernel's own limit (PID_MAX_LIMIT on 64-bit)
_WHOLE = re.compile(r"\s*[+-]?\d+\s*")
_ARGUMENTS = "pid_arguments"
F = TypeVar("F", bound=Callable[..., Any])
TEMPLATE = parsed("address", "kinetoctl.client.host_targets:parse_template")
SLURM_JOB = parsed("job", "kinetoctl.client.slurm:parse_slurm_job")
KUBE = parsed("pod", "kinetoctl.client.kube:parse_kube")

_HOSTS = (
    click.option(
        "--host",
        "hosts",
        metavar="HOST",
        multiple=True,
        help="Host to contact instead of --address: a name, host:port or unix:/path; repeatable.",
    ),
    click.option(
        "--hosts",
        "lists",
        metavar="FILE|A,B,C",
        multiple=True,
        help="List of hosts, or a file (FILE, @FILE) with `name` or `name address` on each line; # starts a comment.",
    ),
    click.option(
        "--slurm-job",
        metavar="JOB[_TASK][+HET][.STEP]",
        type=SLURM_JOB,
        help="Processes of a Slurm job, on all its nodes or only on those given by --host and --hosts.",
    ),
    click.option(
        "--host-address",
        metavar="TEMPLATE",
        type=TEMPLATE,
        help="Template for daemon addresses, such as unix:/run/{host}.sock; {address} is the host's address in Slurm.  "
        f"[env: {endpoints.HOST_ADDRESS_VARIABLE}; default: {DEFAULT_TEMPLATE}]",
    ),
)
_KUBE_OPTIONS = (
    click.option(
        "--kube",
        metavar="NAMESPACE[/POD]",
        type=KUBE,
        multiple=True,
        help="Processes of a pod or, with -l, of the pods of a namespace; repeatable.",
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
_HOST_OPTIONS = (*_HOSTS, *_KUBE_OPTIONS)
PLACE_OPTIONS = (  # the parameters of a command that name hosts: the fields of PlaceOptions
    *("hosts", "lists", "host_address", "slurm_job"),
    *("kube", "kube_selector", "kube_context", "kubeconfig", "kinetod_namespace"),
)


class _Pid(click.IntRange):
    """A process id. Whoever gives a name is told what selects by names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Click's hook."""
        if isinstance(value, str) and not _WHOLE.fullmatch(value):
            self.fail(f"expected a process id, got {value!r:.80}; use --command to select by command line", param, ctx)
        return super().convert(value, param, ctx)


PID = _Pid(1, MAX_PID)
PARAMETERS = tuple(field.name for field in fields(Selection))


_OPTIONS = (
    click.argument(_ARGUMENTS, metavar="[PID]...", nargs=-1, type=PID, shell_complete=completed("pids")),
    click.option(
        "--pid",
        "pids",
        metavar="PID",
        type=PID,
        multiple=True,
        shell_complete=completed("pids"),
        help="Process id; repeatable. Same as the argument PID.",
    ),
    click.option("--children", is_flag=True, help="With --pid: select the descendants of these processes too."),
    click.option(
        "--command", "command_regex", type=REGEX, help="Regular expression (RE2) to search for in the command line."
    ),
    click.option("--user", shell_complete=completed("users"), help="User that runs the process."),
    click.option(
        "--rank",
        "ranks",
        type=RANKS_OR_ALL,
        help="Ranks of the training job, for example 0,8-15, or all for every process that has a rank.",
    ),
    click.option(
        "--gpu",
        "gpus",
        type=GPUS,
        help="GPUs that the process uses, for example 0,2-3: N as in /dev/nvidiaN; AMD and Intel GPUs are numbered "
        "after these.",
    ),
    click.option(
        "--job-id",
        "job_ids",
        multiple=True,
        shell_complete=completed("job_ids"),
        help="Job id from the launcher, such as Slurm; repeatable.",
    ),
    click.option(
        "--job-step", metavar="STEP", help="Step of the Slurm job that --job-id names, for example 0 or batch."
    ),
    click.option(
        "--pod-uid",
        "pod_uids",
        type=POD_UID,
        multiple=True,
        help="UID of a Kubernetes pod; repeatable.",
    ),
    click.option(
        "--container-id",
        "container_ids",
        type=CONTAINER_ID,
        multiple=True,
        help="Container id, or at least its first 12 digits; repeatable.",
    ),
    click.option(
        "--helpers", is_flag=True, help="Include launchers and DataLoader workers, which are otherwise left out."
    ),
)


def selector_options(function: Callable[..., R]) -> Callable[..., R]:
    """Adds the options and the argument PID...; the function gets them as one Selection, `selection`."""

    @functools.wraps(function)
    def with_selection(**values: Any) -> R:
        values["pids"] += values.pop(_ARGUMENTS, ())  # kubectl-kineto has other arguments
        return function(selection=_selection({name: values.pop(name) for name in PARAMETERS}), **values)

    decorated: Callable[..., R] = with_selection
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def _selection(values: dict[str, Any]) -> Selection:
    given: dict[str, Any] = {
        name: tuple(dict.fromkeys(value)) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value
    }
    selection = Selection(**given)
    if selection.children and not selection.pids:
        raise click.UsageError("--children needs --pid, which names the parents")
    if selection.job_step and not selection.job_ids:
        raise click.UsageError("--job-step needs --job-id, which names the job")
    return selection


def required(selection: Selection) -> Selection:
    """The same. Raises click.UsageError if there is no condition at all."""
    if not selection:
        raise click.UsageError(
            "no process is selected: give a pid, or --command, --user, --rank, --gpu, --job-id, --pod-uid or "
            "--container-id (`kinetoctl ps` lists candidates)"
        )
    return selection


def place_options(function: F) -> F:
    """Adds --host, --hosts, --slurm-job, --kube and what goes with them.

    A command takes their values out with `named_places`.
    """
    for option in reversed(_HOST_OPTIONS):
        function = option(function)
    return function


def named_places(values: dict[str, Any]) -> "list[Place]":
    """The hosts that the options name, which are taken out of a command's values; none: ask --address.

    Raises UsageError, CliError.
    """
    given = {name: values.pop(name) for name in PLACE_OPTIONS}
    if not any(given.values()):
        return []
    from kinetoctl.client.host_targets import PlaceOptions, places
    from kinetoctl.client.kube import TUNNELS  # 30 ms, with what they import, that one host does not need

    settings = current()
    click.get_current_context().call_on_close(TUNNELS.close)
    options = PlaceOptions(**given)
    try:
        return places(options, lambda note: None if settings.quiet else say(note, err=True))
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
