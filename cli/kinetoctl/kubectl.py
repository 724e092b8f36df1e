"""`kubectl kineto`: kinetoctl for pods, as a plug-in of kubectl. `kubectl kineto trace NAMESPACE/POD --duration 5s`.

The commands are those of kinetoctl, with pods as arguments instead of --kube, and with kubectl's options for namespace
and context (-n, --context). kubectl gets completions from `kubectl_complete-kineto`.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import ShellComplete

from kinetoctl.__main__ import main as run
from kinetoctl.base.common_options import LazyGroup, common_options
from kinetoctl.client.kube import KubeTarget, namespace_of, parse_kube
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import say

PROGRAM = "kubectl kineto"
COMMANDS = {
    "trace": "trace",
    "ps": "ps",
    "stacks": "stacks",
    "captures": "captures",
    "report": "report",
    "open": "open_trace",
    "version": "version",
}
# Those that are about pods, with their own words.
_HELP = {
    "trace": """Trace the processes of pods, all at the same time, and download the traces.

    \b
    kubectl kineto trace training/llama-0 --duration 5s
    kubectl kineto trace -n training llama-0 llama-1 --rank 0-7
    kubectl kineto trace -n training -l job-name=llama --iterations 20 --output-dir traces

    The pods need no preparation. `kinetoctl trace --help-all` lists the options by topic.
    """,
    "ps": """List which processes of pods can be traced.

    \b
    kubectl kineto ps -n training llama-0
    kubectl kineto ps -n training -l job-name=llama --all
    """,
    "stacks": """Show where each rank in the pods is, and which one the others are waiting for.

    \b
    kubectl kineto stacks -n training llama-0
    kubectl kineto stacks -n training -l job-name=llama --watch
    """,
}
_REPLACED = ("kube", "kube_context", "pid_arguments", "help_all")
_NO_FILES = ":4"  # ShellCompDirectiveNoFileComp of cobra, which kubectl is made with


class PodCommands(LazyGroup):
    """kinetoctl's commands, where they are about processes with pods as arguments."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """None: there is no such command."""
        found = super().get_command(ctx, cmd_name)
        return _of_pods(found, _HELP[cmd_name]) if found is not None and cmd_name in _HELP else found


def _of_pods(command: click.Command, text: str) -> click.Command:
    body: Callable[..., Any] | None = command.callback
    assert body is not None

    def callback(pods: Sequence[str], namespace: str | None, context: str | None, **values: Any) -> Any:
        if pods or namespace or values["kube_selector"]:
            kube = _targets(pods, namespace, context, values)
        else:
            raise click.UsageError("no pod is selected: name pods (POD or NAMESPACE/POD), or select them with -l")
        return body(kube=kube, kube_context=context, **values)

    parameters: list[click.Parameter] = [
        click.Argument(["pods"], nargs=-1, metavar="[[NAMESPACE/]POD]..."),
        click.Option(
            ["-n", "--namespace"], metavar="NAME", help="Namespace of the pods.  [default: that of the context]"
        ),
        click.Option(["--context"], metavar="NAME", help="Context in the kubeconfig.  [default: the current one]"),
    ]
    kept = [each for each in command.params if each.name not in _REPLACED]
    return click.Command(command.name, params=[*parameters, *kept], callback=callback, help=text)


def _targets(
    pods: Sequence[str], namespace: str | None, context: str | None, values: dict[str, Any]
) -> tuple[KubeTarget, ...]:
    """Raises UsageError, KubeFailed."""

    def qualified(pod: str) -> str:
        pod = pod.removeprefix("pod/").removeprefix("pods/")
        return pod if "/" in pod else f"{namespace or namespace_of(context, values['kubeconfig'])}/{pod}"

    try:
        if not pods:
            return (parse_kube(namespace or namespace_of(context, values["kubeconfig"])),)
        return tuple(parse_kube(qualified(pod)) for pod in pods)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


@click.group(
    cls=PodCommands,
    modules=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@common_options
def cli() -> None:
    """Trace the processes of pods on demand and analyse the traces.

    \b
    kubectl kineto ps -n training llama-0                       list what can be traced
    kubectl kineto trace training/llama-0 --duration 5s         trace it; no preparation needed
    kubectl kineto trace -n training -l job-name=llama          trace all pods of a job at the same time

    You need permission to create pods/exec on the pods, and the Role kinetod-client in kinetod's namespace.
    """


def main() -> int:
    """Entry point of the plug-in."""
    return run(group=cli, program=PROGRAM)


def complete(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `kubectl_complete-kineto`: the words after `kubectl kineto`, the last one to be completed."""
    words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    for item in ShellComplete(cli, {}, PROGRAM, "").get_completions(words[:-1], words[-1]):
        if item.type == "plain":
            say(item.value)
    say(_NO_FILES)
    return ExitCode.DONE
