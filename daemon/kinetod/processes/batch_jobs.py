"""Batch jobs of this host by the kernel's control groups, which users cannot choose, unlike variables.

Slurm's slurmstepd puts the processes of a job below `/slurm/uid_UID/job_ID/` (cgroup v1) or
`/system.slice/…slurmstepd.scope/job_ID/` (v2), and those of a step into `step_ID/` there. Only these places at the
root of the hierarchy count: anybody may make folders of the same names in a part that was delegated to them. v2 does
not say whose job it is; it belongs to the user of its oldest process that is not root's. In a control group namespace
of its own the daemon sees no jobs.
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kinetod.processes.containers import read_cgroups
from kinetod.processes.proc_folder import lines

PROC = Path("/proc")
_V1 = re.compile(r"/slurm(?:_[\w.-]+)?/uid_(\d+)/job_(\d+)(?:/step_([\w.+-]+))?(?:/.*)?")
_V2 = re.compile(r"/system\.slice/(?:[\w.-]+_)?slurmstepd\.scope/job_(\d+)(?:/step_([\w.+-]+))?(?:/.*)?")


@dataclass(frozen=True, slots=True)
class Job:
    """A process's job; uid is None where the control group does not say whose it is."""

    id: str
    uid: int | None


def job_in(cgroups: str) -> Job | None:
    """The job of the text of /proc/PID/cgroup."""
    found = None
    for line in cgroups.split("\n"):
        path = line.split(":", 2)[-1]
        if match := _V1.fullmatch(path):
            return Job(match[2], int(match[1]))
        if match := _V2.fullmatch(path):
            found = Job(match[1], None)
    return found


def step_in(cgroups: str) -> str:
    """The step of its job in the text of /proc/PID/cgroup, like "0" or "batch"; empty: not known, or no job."""
    paths = [line.split(":", 2)[-1] for line in cgroups.split("\n")]
    found = [match[3] for path in paths if (match := _V1.fullmatch(path))]
    found += [match[2] for path in paths if (match := _V2.fullmatch(path))]
    return next(filter(None, found), "")


def job_of(pid: int, proc: Path = PROC) -> Job | None:
    """The job of a process. Blocking."""
    return job_in(read_cgroups(pid, proc))


def owned_by(uid: int, members: Iterable[tuple[Job, int, int]]) -> frozenset[str]:
    """The jobs of a user. members: job, uid and start time of processes in jobs."""
    owners: dict[str, tuple[int, int]] = {}
    for job, member_uid, start in members:
        if job.uid is not None:
            owners[job.id] = (-1, job.uid)
        elif member_uid != 0:
            owners[job.id] = min(owners.get(job.id, (start, member_uid)), (start, member_uid))
    return frozenset(job for job, (_start, owner) in owners.items() if owner == uid)


def jobs_of(uid: int, proc: Path = PROC) -> frozenset[str]:
    """The jobs of a user on this host. Blocking."""
    return owned_by(uid, _members(proc))


def _members(proc: Path) -> Iterable[tuple[Job, int, int]]:
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        if (job := job_of(int(entry.name), proc)) is None:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            status = lines((entry / "status").read_bytes())
            uids = [int(line.split()[2]) for line in status if line.startswith("Uid:")]
            yield job, uids[0], int(stat[19])
