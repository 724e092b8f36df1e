"""Findings of `kinetoctl doctor` about libkineto's polls, for the host and for one process."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import lasted

from kinetod.attach.attach_types import Finding, Status

NAME = "libkineto"
ABSTRACT = "the abstract socket @dynolog"
_SWITCH_ON = "set dynolog.ipc = true in kinetod's configuration and restart it"


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoStart:
    """A process that was started with KINETO_USE_DAEMON. folder: its KINETO_IPC_SOCKET_DIR. net_namespace: inode; 0:
    unknown.
    """

    folder: str = ""
    net_namespace: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorState:
    """Where polls are answered: served are places, namespaces the inodes of other network namespaces. problems and
    namespace_problems: why there is no socket elsewhere. queue_length: how many datagrams the kernel queues for a
    socket; 0: unknown.
    """

    served: tuple[str, ...] = ()
    namespaces: frozenset[int] = frozenset()
    own_namespace: int = 0
    problems: Mapping[str, str] = field(default_factory=dict)
    namespace_problems: Mapping[int, str] = field(default_factory=dict)
    processes: int = 0
    queue_length: int = 0


def of_host(door: DoorState | None) -> Iterator[Finding]:
    """Yields one finding for the places that are served, and one for each that is not. door: None if dynolog.ipc is
    off.
    """
    if door is None:
        return
    for place, problem in door.problems.items():
        yield Finding(NAME, Status.PROBLEM, f"polls are not answered at {place}: {problem}")
    if door.served:
        count = (
            f"{door.processes} process{'' if door.processes == 1 else 'es'} poll{'s' if door.processes == 1 else ''}"
        )
        containers = f", and in {_namespaces(len(door.namespaces))}" if door.namespaces else ""
        yield Finding(NAME, Status.OK, f"{count}; polls are answered at {', '.join(door.served)}{containers}")
    if 0 < door.queue_length < door.processes:
        yield Finding(
            NAME,
            Status.NOTE,
            f"{door.processes} processes poll, but the kernel queues only {door.queue_length} datagrams per socket: "
            "processes that poll at the same moment may have to retry after 10 ms or more",
            "set net.unix.max_dgram_qlen to 512 (`sysctl`) and restart kinetod",
        )
    if door.namespace_problems:
        namespace, problem = next(iter(door.namespace_problems.items()))
        others = _namespaces(len(door.namespace_problems))
        detail = f"polls are not answered in {others}; in namespace {namespace}: {problem}"
        yield Finding(NAME, Status.NOTE, detail)


def _namespaces(count: int) -> str:
    return "1 other network namespace" if count == 1 else f"{count} other network namespaces"


def of_process(
    process: pb.Process, start: KinetoStart | None, door: DoorState | None, now_ns: int
) -> Iterator[Finding]:
    """Yields whether it polls, or why not; nothing for a process started without KINETO_USE_DAEMON."""
    if process.HasField("kineto"):
        ago = lasted(process.kineto.last_poll_ns, now_ns)
        doing = ", and its profiler is armed or recording" if process.kineto.tracing else ""
        yield Finding(NAME, Status.OK, f"its libkineto polls this daemon (last poll: {ago} ago){doing}")
    elif start is not None:
        why, advice = _why_not(start, door)
        yield Finding(
            NAME, Status.NOTE, f"started with KINETO_USE_DAEMON, but it does not poll this daemon: {why}", advice
        )


def _why_not(start: KinetoStart, door: DoorState | None) -> tuple[str, str]:
    """Returns the likely cause, and advice."""
    if door is None:
        return "dynolog.ipc is off", _SWITCH_ON
    place = str(PurePath(start.folder)) if start.folder else ABSTRACT
    if start.folder:
        if place not in {*door.served, *door.problems}:
            advice = f"if {place} is the same folder on the host, add it to dynolog.socket_dirs and restart kinetod"
            return f"it looks for the daemon in {place}, which is not one of dynolog.socket_dirs", advice
    elif start.net_namespace not in (0, door.own_namespace, *door.namespaces):
        why = door.namespace_problems.get(start.net_namespace, "this daemon has no socket there yet")
        advice = "wait about 15 s; without root and without the attach helper, kinetod serves only its own namespace"
        return f"it has its own network namespace ({why})", advice
    if problem := door.problems.get(place):
        return f"polls are not answered at {place}: {problem}", "`kinetoctl doctor` shows all places"
    advice = "wait until it has loaded libtorch: polling begins then; a torch without libkineto never polls"
    return "it has not loaded libtorch yet, or has stopped polling", advice
