"""A Slurm job as places: the nodes on which it runs, and its ids there.

Theory of operation
    Each task of an array and each component of a heterogeneous job is a separate job with its own id, so one name on
    the command line means one or more such parts. squeue lists the parts and their steps in fields that are requested
    one by one. `scontrol show job` would mix the same with texts that users choose: a job's name could fake where the
    job runs. scontrol expands lists of nodes and knows the addresses of the nodes.

    Nothing here decides who may trace: each node's daemon does.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.errors import JobNotRunning, NoSuchJob, SlurmFailed

DEADLINE_S = 60.0  # squeue and scontrol give up on a controller by themselves, by default after some 10 s
MAX_TASKS = 1_000_000
_RUNNING = "RUNNING"
_SOON = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESIZING")
_STILL = ("SUSPENDED", "STOPPED", "SIGNALING")
_JOB = re.compile(
    r"(?P<job>\d{1,10})(?:_(?:(?P<task>\d{1,10})|\[(?P<tasks>[\d,:-]+)(?:%\d+)?\]))?(?:\+(?P<component>\d{1,4}))?"
    r"(?:\.(?P<step>\d{1,10}|batch|extern|interactive))?"
)
_PART_FIELDS = (r"[0-9]{1,18}", r"[0-9]{1,18}(_[^+]*|\+[0-9]{1,10})?", r".*", r"[0-9]{1,10}")  # id, name, state, uid
_PART_FORMAT = "%A|%i|%T|%U|%u|%N|%r"  # the reason comes last: the only field that may be more than one word
_STEP_FORMAT = "%i|%N"
_NOT_KNOWN = "Invalid job id specified"
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What --slurm-job names. tasks: None for all of an array; component: None for all of a heterogeneous job."""

    text: str
    job: int
    tasks: frozenset[int] | None = None
    component: int | None = None
    step: str = ""


def parse_slurm_job(text: str) -> SlurmJob:
    """The parts of a text like 4242_7.0. Raises ValueError."""
    match = _JOB.fullmatch(text)
    if match is None or (match["component"] and (match["task"] or match["tasks"])):
        raise ValueError(f"expected a Slurm job like 4242, 4242_7, 4242_[1-3], 4242+1 or 4242.0, got {text!r}")
    tasks = None
    if match["task"] or match["tasks"]:
        tasks = frozenset(_numbers(match["task"] or match["tasks"]))
    component = int(match["component"]) if match["component"] else None
    return SlurmJob(text=text, job=int(match["job"]), tasks=tasks, component=component, step=match["step"] or "")


def _numbers(text: str) -> Iterable[int]:
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10})(?::(\d{1,10}))?)?", item)
        if match is None:
            raise ValueError(f"expected array tasks like 1-3,7, got {item!r}")
        first, last, stride = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or stride == 0 or last - first > MAX_TASKS:
            raise ValueError(f"expected array tasks like 1-3,7, got {item!r}")
        yield from range(first, last + 1, stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPart:
    """A single job, a task of an array, or a component of a heterogeneous job."""

    id: str  # unique in Slurm
    name: str  # "42", "42_7", "42+1"
    state: str
    uid: int
    user: str
    nodes: str  # a list in Slurm's notation; empty while the part is pending
    reason: str

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids that its processes may have in SLURM_JOB_ID.

        In all components of a heterogeneous job it is that of the first; no node has processes of two components.
        """
        leader, is_component, _ = self.name.partition("+")
        return (self.id, leader) if is_component else (self.id,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNode:
    """A node of a job, and the selector of the job's processes on it."""

    name: str
    selector: pb.Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """The nodes of the running parts, and notes for the user."""

    nodes: tuple[JobNode, ...]
    notes: tuple[str, ...] = ()


Run = Callable[[Sequence[str]], str]


def run_slurm(command: Sequence[str]) -> str:
    """The output of one of Slurm's programs. Raises SlurmFailed."""
    # the user's variables, such as SQUEUE_PARTITION, would hide parts of the job
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
            env={**environ, "LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError as exc:
        raise SlurmFailed(
            f"{command[0]}, which is needed to locate Slurm jobs, is not installed here; run kinetoctl on a login node "
            "of the cluster, or install Slurm's client programs (slurm-client)"
        ) from exc
    except OSError as exc:
        raise SlurmFailed(f"{command[0]} cannot be run: {exc.strerror or exc}") from exc
    except subprocess.TimeoutExpired as exc:
        raise SlurmFailed(f"{command[0]} did not answer within {DEADLINE_S:g} s; slurmctld may be down") from exc
    if done.returncode != 0:
        problem = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise SlurmFailed(f"{' '.join(command[:2])} failed: {problem[:500]}")
    return done.stdout


def expand(job: SlurmJob, *, run: Run = run_slurm) -> Expanded:
    """Where the job runs now. Raises NoSuchJob, JobNotRunning, SlurmFailed."""
    parts = _meant(job, _parts(job, run))
    running = [part for part in parts if part.state == _RUNNING]
    if not running:
        raise _not_running(job, parts)
    where = _node_lists(job, running, run)
    names = {nodes: _names(nodes, run) for nodes in dict.fromkeys(nodes for _, nodes in where)}
    ids: dict[str, set[str]] = {}
    for part, nodes in where:
        for node in names[nodes]:
            ids.setdefault(node, set()).update(part.ids)
    found = tuple(JobNode(name=name, selector=_selector(job, ids[name])) for name in ids)
    return Expanded(nodes=found, notes=tuple(_notes(job, parts, running)))


def node_addresses(names: Sequence[str], *, run: Run = run_slurm) -> dict[str, str]:
    """NodeAddr of each node. Raises SlurmFailed."""
    text = run(("scontrol", "show", "node", "--oneliner", ",".join(names)))
    found = dict(re.findall(r"^NodeName=(\S+) .*? NodeAddr=(\S+) ", text, re.MULTILINE))
    if missing := [name for name in names if name not in found]:
        raise SlurmFailed(f"scontrol show node gives no address for {few(missing)}")
    return found


def _selector(job: SlurmJob, ids: Iterable[str]) -> pb.Selector:
    return pb.Selector(job_ids=sorted(set(ids), key=int), job_step=job.step)


# the parts of a job


def _parts(job: SlurmJob, run: Run) -> list[JobPart]:
    """All parts of the job. Raises NoSuchJob, SlurmFailed."""
    command = ("squeue", f"--jobs={job.job}", "--array", "--all", "--states=all", "--noheader", f"-o{_PART_FORMAT}")
    try:
        output = run(command)
    except SlurmFailed as exc:
        if _NOT_KNOWN not in str(exc):
            raise
        raise _unknown(job) from exc
    # with SLURM_CLUSTERS the name of the cluster comes first
    parts = [_part(line) for line in output.splitlines() if line.strip() and not line.startswith("CLUSTER: ")]
    if not parts:
        raise _unknown(job)
    return parts


def _meant(job: SlurmJob, everything: Sequence[JobPart]) -> list[JobPart]:
    """The parts that the name selects. Raises NoSuchJob."""
    parts = [part for part in everything if _is_meant(job, part)]
    if not parts:
        what = "task" if job.tasks is not None else "component"
        raise NoSuchJob(f"Slurm job {job.job} has no {what} {job.text}; it has {few(part.name for part in everything)}")
    return parts


def _part(line: str) -> JobPart:
    fields = line.strip().split("|", 6)
    if len(fields) != 7 or not all(map(re.fullmatch, _PART_FIELDS, fields)):
        raise SlurmFailed(f"squeue printed an unexpected line: {line[:200]!r}")
    id, name, state, uid, user, nodes, reason = fields
    return JobPart(id=id, name=name, state=state, uid=int(uid), user=user, nodes=nodes, reason=reason)


def _is_meant(job: SlurmJob, part: JobPart) -> bool:
    match = re.fullmatch(r"\d+(?:_(\d+)|\+(\d+))?", part.name)
    if match is None:  # pending tasks of an array in one line: "42_[3-9]"
        return job.tasks is None and job.component is None
    task, component = match[1], match[2]
    return (job.tasks is None or (task is not None and int(task) in job.tasks)) and (
        job.component is None or (component is not None and int(component) == job.component)
    )


def _unknown(job: SlurmJob) -> NoSuchJob:
    return NoSuchJob(
        f"Slurm does not know job {job.job}: it ended a while ago, never existed, or belongs to another user or "
        "cluster (SLURM_CLUSTERS)"
    )


def _not_running(job: SlurmJob, parts: Sequence[JobPart]) -> JobNotRunning | NoSuchJob:
    states = sorted({part.state for part in parts})
    text = f"Slurm job {job.text} is {' and '.join(states)}"
    if any(part.state in _SOON for part in parts):
        reasons = sorted({part.reason for part in parts if part.reason not in ("", "None")})
        why = f" ({', '.join(reasons[:_SHOWN])})" if reasons else ""
        return JobNotRunning(f"{text}{why}: it has no processes yet; try again once squeue shows RUNNING")
    if any(part.state in _STILL for part in parts):
        return JobNotRunning(
            f"{text}: its processes are suspended; try again once it has resumed (scontrol resume {job.job})"
        )
    return NoSuchJob(f"{text}: it has no processes left")


def _notes(job: SlurmJob, parts: Sequence[JobPart], running: Sequence[JobPart]) -> Iterable[str]:
    if len(running) < len(parts):
        others = ", ".join(sorted({part.state for part in parts if part.state != _RUNNING}))
        yield f"{len(running)} of {len(parts)} parts of Slurm job {job.text} are running; the others are {others}"
    uids = {part.uid: part.user for part in running}
    if os.geteuid() not in (0, *uids):
        users = ", ".join(sorted(uids.values()))
        yield f"Slurm job {job.text} belongs to {users}; only its owner and the daemons' administrators can trace it"


# nodes


def _node_lists(job: SlurmJob, parts: Sequence[JobPart], run: Run) -> list[tuple[JobPart, str]]:
    """The parts that have the step, with their lists of nodes."""
    if not job.step:
        return [(part, part.nodes) for part in parts]
    ids = ",".join(part.id for part in parts)
    output = run(("squeue", "--steps", f"--jobs={ids}", "--all", "--noheader", f"-o{_STEP_FORMAT}"))
    steps = dict(line.strip().split("|", 1) for line in output.splitlines() if "|" in line)
    # squeue has steps of arrays under the names of the tasks, those of components under their ids
    names = ((part, f"{name}.{job.step}") for part in parts for name in dict.fromkeys((part.name, part.id)))
    found = [(part, steps[name]) for part, name in names if name in steps]
    if not found:
        raise NoSuchJob(f"Slurm job {job.text} has no such step at the moment; its steps are: {few(steps) or 'none'}")
    return found


def _names(nodes: str, run: Run) -> list[str]:
    """The nodes of a list like n[1-3,7]."""
    if not re.search(r"[\[,]", nodes):
        return [nodes]
    return run(("scontrol", "show", "hostnames", nodes)).split()


def few(names: Iterable[str]) -> str:
    """The first few names, for messages."""
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
