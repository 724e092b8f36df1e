"""The kernel's facts about processes: owner, command, GPUs, launcher. Blocking; call it in a thread.

Theory of operation
    A process's other telemetry is in its environment: OpenTelemetry's resource, and the W3C trace context. A span that
    is current in a running program is a context variable of one thread or task, which cannot be read from outside
    without stopping the interpreter; the environment at its start is fixed and harmless to read. Both variables of the
    resource are OpenTelemetry's (the specification of its SDKs); TRACEPARENT is how a launcher passes its span to a
    program. The process controls all of it, so sizes are bounded, and it serves as a description only.

    The framework that a Python process trains with is found by its mapped libraries. A loaded library stays, so a
    result holds until the program ends; without a result, the next call reads the map again.
"""

import contextlib
import functools
import os
import pwd
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import psutil
from kineto_trace.base.telemetry_ids import SERVICE_NAME, TRACE_PARENT_VARIABLE, TraceContext

from kinetod.base.safe_text import clean
from kinetod.processes import credentials
from kinetod.processes.accelerator_signs import OutsideSigns, shown
from kinetod.processes.containers import Container, Names, container_in, pod_in, read_cgroups
from kinetod.processes.credentials import Credentials
from kinetod.processes.drm_gpus import RENDER_NODE, numbers_by_node
from kinetod.processes.identity import PROC, ProcessFolder, ProcessKey, lines, started_ns

Framework = Literal["", "torch", "jax", "tensorflow", "cupy"]
# The first match counts: a program that uses torch may have loaded the others for its data.
LIBRARIES: dict[Framework, tuple[bytes, ...]] = {
    "torch": (b"/libtorch_cpu.so", b"/libtorch_python.so", b"/libtorch.so"),
    "jax": (b"/libjax_common.so", b"/xla_extension.so", b"/_jax."),
    "tensorflow": (b"/libtensorflow_framework.so", b"/libtensorflow_cc.so", b"/_pywrap_tensorflow_internal.so"),
    "cupy": (b"/cupy/_core/",),
}
_MAX_KNOWN = 4096
_known: dict[str, Framework] = {}  # program -> framework
_GPU_DEVICE = re.compile(r"/dev/nvidia(\d+)")
_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]*")
_MAX_COMMAND_CHARS = 4096  # thousands of processes must fit into one message
_INT32_MAX = 2**31 - 1
# First match wins: torchrun and friends, then the launchers that only number their tasks.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
JOB_ID_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
JOB_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID")
NODE_VARIABLE = "SLURMD_NODENAME"  # set in every process that slurmd has started
_STEPS = {"4294967291": "batch", "4294967292": "extern", "4294967290": "interactive"}  # Slurm's numbers for these
SERVICE_VARIABLE = "OTEL_SERVICE_NAME"
RESOURCE_VARIABLE = "OTEL_RESOURCE_ATTRIBUTES"
TELEMETRY_VARIABLES = (TRACE_PARENT_VARIABLE, SERVICE_VARIABLE, RESOURCE_VARIABLE)
MAX_ATTRIBUTES = 16
MAX_BYTES = 512  # of all names and values: the facts of many processes must fit into one message
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 256
MAX_TRACE_PARENT_CHARS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WANTED = frozenset(
    name.encode()
    for name in (
        *(*RANK_VARIABLES, *WORLD_SIZE_VARIABLES, *JOB_ID_VARIABLES, *JOB_STEP_VARIABLES, NODE_VARIABLE),
        *TELEMETRY_VARIABLES,
    )
)
KEEP_NAMES_S = 60.0
_STAT_STATE, _STAT_PARENT, _STAT_START_TIME = 0, 1, 19  # /proc/PID/stat behind the name: fields 3, 4 and 22 in proc(5)
MAX_GENERATIONS = 100  # anybody can make thousands
_V1 = re.compile(r"/slurm(?:_[\w.-]+)?/uid_(\d+)/job_(\d+)(?:/step_([\w.+-]+))?(?:/.*)?")
_V2 = re.compile(r"/system\.slice/(?:[\w.-]+_)?slurmstepd\.scope/job_(\d+)(?:/step_([\w.+-]+))?(?:/.*)?")


def framework(folder: ProcessFolder, program: str) -> Framework:
    """A key of LIBRARIES; empty if the process has none of them or may not be inspected.

    program: as named by `credentials.program`; empty: unknown.
    """
    if program in _known:
        return _known[program]
    with contextlib.suppress(OSError):
        mapped = folder.read_once("maps")
        found: Framework = next(
            (name for name, files in LIBRARIES.items() if any(file in mapped for file in files)), ""
        )
        if found and program:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[program] = found
        return found
    return ""


def trace_parent(environ: Mapping[str, str]) -> str:
    """The trace context in which the process was started; "" for none or an invalid one."""
    return checked_trace_parent(environ.get(TRACE_PARENT_VARIABLE, "").strip())


def checked_trace_parent(text: str) -> str:
    """The text if it is a valid trace context of a normal length; otherwise ""."""
    return text if len(text) <= MAX_TRACE_PARENT_CHARS and TraceContext.parse(text) else ""


def resource(environ: Mapping[str, str]) -> dict[str, str]:
    """The attributes of the process's own telemetry, from its environment."""
    parts = [part.partition("=") for part in environ.get(RESOURCE_VARIABLE, "").split(",")]
    named = {name.strip(): unquote(value.strip()) for name, separator, value in parts if separator}
    if service := environ.get(SERVICE_VARIABLE, "").strip():
        named = {SERVICE_NAME: service, **{name: value for name, value in named.items() if name != SERVICE_NAME}}
    return checked_resource(named)


def checked_resource(named: Mapping[str, str]) -> dict[str, str]:
    """The attributes with valid names, as far as they fit."""
    found: dict[str, str] = {}
    room = MAX_BYTES
    for name, text in named.items():
        value = clean(text, MAX_VALUE_CHARS)
        room -= len(name) + len(value.encode())
        if len(found) == MAX_ATTRIBUTES or room < 0:
            break
        if value and len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name):
            found[name] = value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process. Unreadable fields are empty or None."""

    key: ProcessKey
    uid: int
    user: str
    command: tuple[str, ...]
    gpus: tuple[int, ...]
    rank: int | None
    world_size: int | None
    job_id: str
    is_python: bool
    framework: Framework = ""  # of a Python process
    plugins: tuple[str, ...] = ()  # likewise: plug-ins whose signs are visible from outside
    parent_pid: int = 0
    ancestors: tuple[int, ...] = ()  # the parent first; not read by read_facts
    is_ours: bool = False  # kinetoctl, kinetod and its helpers, of any daemon
    hidden: bool = False  # the kernel hides the fields of PrivateFacts from us
    plain: bool = True  # the kernel lets its user trace it: no set-uid program, not undumpable
    capable: bool = False  # not plain only because of capabilities, which count if it is in our user namespace
    job: str = ""  # the batch job that the kernel's control groups put it into
    job_step: str = ""  # from the control groups, or from its environment
    pod: str = ""  # the UID of the Kubernetes pod, likewise
    container: Container | None = None  # likewise, if the path shows it
    names: Names | None = None  # their names in Kubernetes
    credentials: Credentials | None = None  # the basis of a decision about it, compared later
    trace_parent: str = ""  # W3C trace context in which it was started
    resource: Mapping[str, str] = field(default_factory=dict)  # OpenTelemetry's attributes, from its environment

    def with_private(self, private: "PrivateFacts") -> "ProcessFacts":
        """Adds facts read by somebody else, unless the process runs another program by then."""
        if private.uid not in (None, self.uid):
            return self
        known = self.credentials and replace(self.credentials, program=private.program)
        return replace(
            self,
            credentials=known,
            gpus=private.gpus,
            rank=private.rank,
            world_size=private.world_size,
            job_id=private.job_id,
            job_step=self.job_step if self.job else private.job_step,
            is_python=self.is_python or private.is_python,
            framework=private.framework,
            plugins=private.plugins,
            trace_parent=private.trace_parent,
            resource=private.resource,
            hidden=False,
            plain=self.plain or (self.capable and private.own_user_namespace),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFacts:
    """Facts that the kernel shows only to the process's own user and to those who may trace it."""

    gpus: tuple[int, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    job_id: str = ""
    job_step: str = ""
    is_python: bool = False  # by its executable
    framework: Framework = ""  # see ProcessFacts
    plugins: tuple[str, ...] = ()  # likewise
    own_user_namespace: bool = False  # as in a container started by its user
    uid: int | None = None  # its user at that time; None: unknown
    program: str = ""  # see Credentials
    trace_parent: str = ""  # see ProcessFacts
    resource: Mapping[str, str] = field(default_factory=dict)


def read_facts(pid: int, proc: Path = PROC, signs: Sequence[OutsideSigns] = ()) -> ProcessFacts | None:
    """Reads a process; None if it does not exist (or is a zombie, which can never be traced).

    signs: of the plug-ins to look for.
    """
    try:
        with ProcessFolder(pid, proc) as folder:
            return _read_facts(pid, folder, proc, signs)
    except (OSError, ValueError, IndexError):
        return None


def _read_facts(pid: int, folder: ProcessFolder, proc: Path, signs: Sequence[OutsideSigns]) -> ProcessFacts | None:
    stat = folder.read("stat")
    name, _, rest = stat[stat.index(b"(") + 1 :].rpartition(b")")  # the name may contain anything
    fields = rest.split()
    if fields[_STAT_STATE] in (b"Z", b"X", b"x"):
        return None
    arguments = _command(folder)  # empty: a kernel thread
    command = arguments or [os.fsdecode(name)]
    named_python = _PYTHON.fullmatch(_base_name(command[0])) is not None
    private, rights = _read_with_rights(pid, folder, proc, signs, named_python=named_python)
    if _command(folder) != arguments:  # it may be another user's now, hidden from those who may see its former self
        command = ["(changing)"]
    cgroups = _cgroups(folder)
    job = job_in(cgroups)
    dumpable = not rights.changes_rights and rights.dumpable is not False
    capable = rights.uid != 0 and rights.capabilities != 0
    return ProcessFacts(
        key=ProcessKey(pid, started_ns(int(fields[_STAT_START_TIME]))),
        uid=rights.uid,
        user=user_name(rights.uids[0]),
        command=_clipped(command),
        gpus=private.gpus,
        rank=private.rank,
        world_size=private.world_size,
        job_id=private.job_id,
        is_python=private.is_python or named_python,
        framework=private.framework,
        plugins=private.plugins,
        trace_parent=private.trace_parent,
        resource=private.resource,
        parent_pid=int(fields[_STAT_PARENT]),
        is_ours=_is_ours(command),
        hidden=bool(arguments) and _hidden(folder),
        plain=dumpable and (not capable or private.own_user_namespace),
        capable=dumpable and capable,
        job=job.id if job is not None else "",
        job_step=step_in(cgroups) if job is not None else private.job_step,
        pod=pod_in(cgroups),
        container=container_in(cgroups),
        credentials=rights,
    )


def _read_with_rights(
    pid: int, folder: ProcessFolder, proc: Path, signs: Sequence[OutsideSigns], *, named_python: bool = False
) -> tuple[PrivateFacts, Credentials]:
    """Reads both for the same program; without private facts if it changed. Raises OSError.

    named_python: whether its command line says that it is Python.
    """
    before = credentials.program(f"{proc}/{pid}")
    private = _read_private(folder)
    if private.is_python or named_python:
        private = replace(private, framework=framework(folder, before), plugins=shown(folder, before, signs))
    rights = credentials.read(pid, proc=proc)
    if before != rights.program:
        private = PrivateFacts()
    return replace(private, uid=rights.uid, program=rights.program), rights


def read_all(pids: Iterable[int], proc: Path = PROC, signs: Sequence[OutsideSigns] = ()) -> list[ProcessFacts]:
    """Reads the processes that exist, with their ancestors. signs: of the plug-ins to look for."""
    family = Family(proc)
    found = [facts for pid in pids if (facts := read_facts(pid, proc, signs)) is not None]
    for facts in found:
        family.add(facts.key, facts.parent_pid)
    return [replace(facts, ancestors=family.ancestors(facts.key.pid)) for facts in found]


def read_private(pid: int, proc: Path = PROC, signs: Sequence[OutsideSigns] = ()) -> PrivateFacts:
    """Reads the private facts; those that may not be read are empty. signs: of the plug-ins to look for."""
    with contextlib.suppress(OSError), ProcessFolder(pid, proc) as folder:
        return _read_with_rights(pid, folder, proc, signs)[0]
    return PrivateFacts()


def _read_private(folder: ProcessFolder) -> PrivateFacts:
    environ = _environ(folder)
    job, step = _first(environ, JOB_ID_VARIABLES), _first(environ, JOB_STEP_VARIABLES)
    if not step and NODE_VARIABLE in environ:
        step = "batch"  # all other steps have their number in the environment
    return PrivateFacts(
        gpus=open_gpus(folder),
        rank=_number(environ, RANK_VARIABLES),
        world_size=_number(environ, WORLD_SIZE_VARIABLES),
        job_id=clean("" if job == "none" else job, 128),  # torchrun's default
        job_step=clean(_STEPS.get(step, step), 32),
        is_python=_runs_python(folder),
        own_user_namespace=_in_own_user_namespace(folder),
        trace_parent=trace_parent(environ),
        resource=resource(environ),
    )


def user_name(uid: int) -> str:
    """The name of a user, or the number if there is none. Looked up once a minute: the databases may be on the network.

    Blocks as they do.
    """
    return _name_in_this_minute(uid, int(time.monotonic() / KEEP_NAMES_S))


@functools.lru_cache(maxsize=4096)
def _name_in_this_minute(uid: int, _minute: int) -> str:
    with contextlib.suppress(KeyError, OSError):
        return clean(pwd.getpwuid(uid).pw_name, 64)
    return str(uid)


def _command(folder: ProcessFolder) -> list[str]:
    """A process that has changed its title may lack the zeros between and after the arguments."""
    text = os.fsdecode(folder.read("cmdline"))
    if not text:
        return []
    if not text.endswith("\0"):
        return text.removesuffix(" ").split(" ")
    arguments = text[:-1].split("\0")
    return arguments[0].split(" ") if len(arguments) == 1 else arguments


def _cgroups(folder: ProcessFolder) -> str:
    with contextlib.suppress(OSError):
        return folder.read("cgroup").decode("utf-8", "replace")
    return ""


def _in_own_user_namespace(folder: ProcessFolder) -> bool:
    with contextlib.suppress(OSError):
        return folder.link("ns/user") != str((PROC / "self/ns/user").readlink())
    return False


def _hidden(folder: ProcessFolder) -> bool:
    """Whether the kernel refuses files that only tracers of the process may read."""
    try:
        os.close(folder.open("environ"))
    except PermissionError:
        return True
    except OSError:
        return False
    return False


_OUR_PROGRAMS = ("kinetoctl", "kinetod")


def _is_ours(command: list[str]) -> bool:
    """`python .../kinetoctl …`, `python -u -m kinetod…`; not the demo's training process."""
    if command and _base_name(command[0]) in _OUR_PROGRAMS:
        return True
    arguments = iter(command[1:])
    for argument in arguments:
        if argument == "-m":
            module = next(arguments, "")
            return module == "kinetoctl" or module.partition(".")[0] == "kinetod"
        if argument in ("-W", "-X"):
            next(arguments, "")
        elif not argument.startswith("-") or argument == "-c":
            return _base_name(argument) in _OUR_PROGRAMS
    return False


def _clipped(command: list[str]) -> tuple[str, ...]:
    """The first arguments that fit into the limit."""
    clipped: list[str] = []
    room = _MAX_COMMAND_CHARS
    for argument in command:
        if room <= 0:
            break
        clipped.append(clean(argument, room))
        room -= len(argument) + 1
    return tuple(clipped)


def foreign_pids(proc: Path = PROC) -> set[int]:
    """Every process of this PID namespace except this daemon and its workers."""
    own = psutil.Process()
    everything = {int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()}
    return everything - {own.pid} - {child.pid for child in own.children()}


def open_gpus(folder: ProcessFolder) -> tuple[int, ...]:
    """The numbers of the GPUs that the process has open; empty if that may not be read.

    NVIDIA's are the minors of /dev/nvidiaN; those of AMD's and Intel's render nodes come from drm_gpus.
    """
    numbers = set()
    with contextlib.suppress(OSError):
        for path in folder.links("fd"):
            if match := _GPU_DEVICE.fullmatch(path):
                numbers.add(int(match[1]))
            elif path.startswith(RENDER_NODE) and (number := numbers_by_node().get(path)) is not None:
                numbers.add(number)
    return tuple(sorted(number for number in numbers if number <= _INT32_MAX))


def _environ(folder: ProcessFolder) -> dict[str, str]:
    """The relevant variables; the first counts if one occurs twice, as in getenv."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for entry in folder.read_once("environ").split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name in _WANTED:
                found.setdefault(name.decode(), value.decode("utf-8", "replace"))
    return found


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    text = _first(environ, names)
    return int(text) if text.isascii() and text.isdecimal() and int(text) <= _INT32_MAX else None


def _runs_python(folder: ProcessFolder) -> bool:
    with contextlib.suppress(OSError):
        return _PYTHON.fullmatch(_base_name(folder.link("exe"))) is not None
    return False


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


# Process ancestry from /proc. Blocking, but never waits for another process.
@dataclass(frozen=True, slots=True)
class _Kin:
    parent: int
    start_time_ns: int


class Family:
    """Processes and their ancestors at one moment: each is read at most once, and not at all if it was added.

    A parent that started later than its child is another process, which reused the pid.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._known: dict[int, _Kin | None] = {}

    def add(self, key: ProcessKey, parent_pid: int) -> None:
        """Adds a process that was already read."""
        self._known[key.pid] = _Kin(parent_pid, key.start_time_ns)

    def ancestors(self, pid: int) -> tuple[int, ...]:
        """The parent first; the nearest MAX_GENERATIONS."""
        found = {pid: None}  # in their order
        process = self._kin(pid)
        while process is not None and process.parent > 0 and len(found) <= MAX_GENERATIONS:
            parent = self._kin(process.parent)
            if parent is None or parent.start_time_ns > process.start_time_ns or process.parent in found:
                break
            found[process.parent] = None
            process = parent
        return tuple(found)[1:]

    def _kin(self, pid: int) -> _Kin | None:
        if pid not in self._known:
            self._known[pid] = self._read(pid)
        return self._known[pid]

    def _read(self, pid: int) -> _Kin | None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            return _Kin(int(fields[_STAT_PARENT]), started_ns(int(fields[_STAT_START_TIME])))
        return None


def with_descendants(pids: Collection[int], proc: Path = PROC) -> set[int]:
    """These processes and all their descendants, in any session."""
    family, roots = Family(proc), set(pids)
    everything = [int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()]
    return {pid for pid in everything if pid in roots or not roots.isdisjoint(family.ancestors(pid))}


# Batch jobs of this host, from the kernel's control groups, which users cannot choose, unlike variables. Slurm's
# slurmstepd puts the processes of a job below `/slurm/uid_UID/job_ID/` (cgroup v1) or
# `/system.slice/…slurmstepd.scope/job_ID/` (v2), and those of a step into `step_ID/` there. Only these places at the
# root of the hierarchy count: anybody may make folders of the same names in a part that was delegated to them. v2 does
# not name the job's user; the job belongs to the user of its oldest process that is not root's. In its own control
# group namespace the daemon sees no jobs.
@dataclass(frozen=True, slots=True)
class Job:
    """A process's job. uid is None if the control group does not name the user."""

    id: str
    uid: int | None


def job_in(cgroups: str) -> Job | None:
    """The job in the text of /proc/PID/cgroup."""
    found = None
    for line in cgroups.split("\n"):
        path = line.split(":", 2)[-1]
        if match := _V1.fullmatch(path):
            return Job(match[2], int(match[1]))
        if match := _V2.fullmatch(path):
            found = Job(match[1], None)
    return found


def step_in(cgroups: str) -> str:
    """The job step in the text of /proc/PID/cgroup, like "0" or "batch"; empty: unknown, or no job."""
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
