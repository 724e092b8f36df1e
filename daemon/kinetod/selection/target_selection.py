"""Which of the selected processes only help the others: launchers and DataLoader workers. Pure.

Theory of operation
    Where a process holds a context on a GPU, the training is where these are: those that hold one are meant, and
    what runs the very command line of one of them beside it, since it has not come so far yet.

    Where none does, or it cannot be seen, relations tell. A worker is forked, and then has its parent's command line
    and opens no GPU of its own, or is started by multiprocessing, joblib or torch's compiler with a command line that
    is theirs. A launcher is an ancestor of what remains. Workers go first: their parent is no launcher. Of what remains
    those that have a GPU open count more than others.

    A process that has finished iterations trains, whatever it looks like.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WORKERS = re.compile(
    r"from multiprocess(?:ing)?\.\w+ import "  # python -c "from multiprocessing.spawn import spawn_main; …"
    r"|\bloky\.backend\b"
    r"|/torch/_inductor/compile_worker/"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A selected process."""

    pid: int
    command: tuple[str, ...]
    ancestors: tuple[int, ...] = ()  # the parent first
    gpus: frozenset[int] = frozenset()  # that it holds or has open
    holds: bool = False  # a context on a GPU
    trains: bool = False  # it has finished iterations


def leading(members: Iterable[Member]) -> frozenset[int]:
    """The pids of those that do not only help others; of one or more members at least one."""
    by_pid = {each.pid: each for each in members}
    workers = {each.pid for each in by_pid.values() if not each.trains and _is_worker(each, by_pid)}
    rest = [each for each in by_pid.values() if each.pid not in workers]
    holding = {each.pid: each for each in by_pid.values() if each.holds}
    if holding:
        commands = {each.command for each in holding.values()}
        above = _above(holding.values())
        late = {
            each.pid
            for each in rest
            if each.command in commands and each.pid not in above and holding.keys().isdisjoint(each.ancestors)
        }
        return frozenset(holding.keys() | late | {each.pid for each in rest if each.trains})
    if any(each.gpus for each in rest):
        rest = [each for each in rest if each.gpus or each.trains]
    above = _above(rest)
    return frozenset(each.pid for each in rest if each.trains or each.pid not in above)


def leading_of_families(members: Iterable[Member]) -> frozenset[int]:
    """As `leading`, in each family by itself: those that descend from the same member. Programs of others do not count
    as helpers because one of them holds a context.
    """
    by_pid = {each.pid: each for each in members}
    families: dict[int, list[Member]] = {}
    for each in by_pid.values():
        eldest = next((pid for pid in reversed(each.ancestors) if pid in by_pid), each.pid)
        families.setdefault(eldest, []).append(each)
    return frozenset().union(*map(leading, families.values()))


def _above(members: Iterable[Member]) -> set[int]:
    return {pid for each in members for pid in each.ancestors}


def _is_worker(member: Member, members: Mapping[int, Member]) -> bool:
    parent = members.get(member.ancestors[0]) if member.ancestors else None
    if member.gpus - (parent.gpus if parent is not None else frozenset()):
        return False  # not inherited
    if parent is not None and parent.command == member.command:
        return True
    return not members.keys().isdisjoint(member.ancestors) and _WORKERS.search(" ".join(member.command)) is not None
