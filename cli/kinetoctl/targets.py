"""Which processes a command means: the selector options, shared by `trace` and `ps`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.parsing import RANKS, REGEX

F = TypeVar("F", bound=Callable[..., Any])
MAX_PID = 2**22  # the kernel's own limit (PID_MAX_LIMIT on 64-bit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """All given conditions must hold; empty means no condition."""

    pids: tuple[int, ...] = ()
    command_regex: str = ""
    user: str = ""
    ranks: tuple[int, ...] = ()
    job_ids: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pids or self.command_regex or self.user or self.ranks or self.job_ids)

    def to_proto(self) -> pb.Selector:
        """The request's form."""
        return pb.Selector(
            pids=self.pids, command_regex=self.command_regex, user=self.user, ranks=self.ranks, job_ids=self.job_ids
        )


def complete_pid(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
    """For a pid on the command line."""
    from kinetoctl.complete import pids  # only when a shell asks: it needs the daemon

    return pids(incomplete)


_OPTIONS = (
    click.option(
        "--pid",
        "pids",
        metavar="PID",
        type=click.IntRange(1, MAX_PID),
        multiple=True,
        shell_complete=complete_pid,
        help="Process id; may be given several times.",
    ),
    click.option(
        "--command", "command_regex", type=REGEX, help="Regular expression (RE2) searched in the command line."
    ),
    click.option("--user", help="User that the process runs as."),
    click.option("--rank", "ranks", type=RANKS, help="Ranks of the training job, like 0,8-15."),
    click.option(
        "--job-id",
        "job_ids",
        multiple=True,
        help="Id that the launcher gave the job (Slurm and others); may be given several times.",
    ),
)


def selector_options(function: F) -> F:
    """Adds --pid, --command, --user, --rank and --job-id."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def make_selection(
    pids: tuple[int, ...],
    command_regex: str | None,
    user: str | None,
    ranks: tuple[int, ...] | None,
    job_ids: tuple[str, ...],
) -> Selection:
    """The selection of the parsed selector options."""
    return Selection(
        pids=tuple(dict.fromkeys(pids)),
        command_regex=command_regex or "",
        user=user or "",
        ranks=ranks or (),
        job_ids=tuple(dict.fromkeys(job_ids)),
    )


def required_selection(
    pids: tuple[int, ...],
    command_regex: str | None,
    user: str | None,
    ranks: tuple[int, ...] | None,
    job_ids: tuple[str, ...],
) -> Selection:
    """Likewise. Raises click.UsageError if there is no condition at all."""
    selection = make_selection(pids, command_regex, user, ranks, job_ids)
    if not selection:
        raise click.UsageError(
            "which processes? Give --pid, --command, --user, --rank or --job-id (`kinetoctl ps` lists candidates)"
        )
    return selection
