"""What prevents a trace of a process, in a few words: as much as lists can know without looking closely.

`kinetoctl doctor` looks closely. Nothing is said here of what was not seen, so "no obstacle" is no promise.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.permissions.role_policy import Action, Caller, may
from kinetod.processes.identity import PROC
from kinetod.processes.proc_folder import lines
from kinetod.selection.candidate import Candidate

ATTACHING_OFF = "no agent; attaching is off"
NOT_SERVED = "another user's"  # of a daemon that serves its own user only
PROTECTED = "protected by the kernel"
NOT_ALLOWED = "not permitted"
OTHER_VERSION = "agent of another version"
STOPPED = "stopped"


async def note(
    candidates: Sequence[Candidate], caller: Caller, *, own_uid: int, attaching: bool, proc: Path = PROC
) -> None:
    """Fills in `obstacle`. own_uid: whose processes are within reach, 0 for everybody's; attaching: as in Registry."""
    without_agent = [each.key.pid for each in candidates if not each.has_agent()]
    seen = await asyncio.to_thread(lambda: {pid: seen_in_status(pid, proc) for pid in without_agent})
    for each in candidates:
        each.process.obstacle = (
            _of_rights(each, caller, own_uid) or _of_agent(each, attaching) or seen.get(each.key.pid, "")
        )


def _of_rights(candidate: Candidate, caller: Caller, own_uid: int) -> str:
    facts = candidate.facts
    if own_uid not in (0, facts.uid):
        return NOT_SERVED
    if may(caller, Action.TRACE, candidate.thing()):
        return ""
    return PROTECTED if facts.uid == caller.uid and not facts.plain else NOT_ALLOWED


def _of_agent(candidate: Candidate, attaching: bool) -> str:
    if candidate.process.agent_state == pb.AGENT_STATE_INCOMPATIBLE:
        return OTHER_VERSION
    return "" if attaching or candidate.has_agent() else ATTACHING_OFF


def seen_in_status(pid: int, proc: Path = PROC) -> str:
    """What the kernel's status says against attaching; empty if nothing. Blocking."""
    with contextlib.suppress(OSError, ValueError):
        status = dict(
            line.split(":\t", 1) for line in lines((proc / str(pid) / "status").read_bytes()) if ":\t" in line
        )
        if (tracer := int(status.get("TracerPid", "0"))) > 0:
            return f"traced by process {tracer}"
        return STOPPED if status.get("State", "").startswith("T") else ""
    return ""
