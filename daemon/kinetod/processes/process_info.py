"""What the kernel says of processes: owner, command, GPUs, launcher. Blocking; call it in a thread."""

import contextlib
import functools
import os
import pwd
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from kinetod.base.safe_text import clean
from kinetod.processes import credentials, telemetry_variables
from kinetod.processes.accelerator_signs import OutsideSigns, shown
from kinetod.processes.ancestry import Family
from kinetod.processes.batch_jobs import job_in, step_in
from kinetod.processes.containers import Container, Names, container_in, pod_in
from kinetod.processes.credentials import Credentials
from kinetod.processes.drm_gpus import RENDER_NODE, numbers_by_node
from kinetod.processes.frameworks import Framework, framework
from kinetod.processes.identity import PROC, ProcessKey, started_ns
from kinetod.processes.proc_folder import ProcessFolder

_GPU_DEVICE = re.compile(r"/dev/nvidia(\d+)")
_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]*")
_MAX_COMMAND_CHARS = 4096  # thousands of processes must fit into one message
_INT32_MAX = 2**31 - 1
# First match wins: torchrun and friends, then the launchers that only number their tasks.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
JOB_ID_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
JOB_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID")
NODE_VARIABLE = "SLURMD_NODENAME"  # in all that slurmd has started
_STEPS = {"4294967291": "batch", "4294967292": "extern", "4294967290": "interactive"}  # Slurm's numbers for these
_WANTED = frozenset(
    name.encode()
    for name in (
        *(*RANK_VARIABLES, *WORLD_SIZE_VARIABLES, *JOB_ID_VARIABLES, *JOB_STEP_VARIABLES, NODE_VARIABLE),
        *telemetry_variables.VARIABLES,
    )
)
KEEP_NAMES_S = 60.0
_STAT_STATE, _STAT_PARENT, _STAT_START_TIME = 0, 1, 19  # /proc/PID/stat behind the name: fields 3, 4 and 22 in proc(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process. What may not be read is empty or None."""

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
    plugins: tuple[str, ...] = ()  # likewise: whose signs it shows, as far as they are seen from outside
    parent_pid: int = 0
    ancestors: tuple[int, ...] = ()  # the parent first; not read by read_facts
    is_ours: bool = False  # kinetoctl, kinetod and its helpers, of whatever daemon
    hidden: bool = False  # the kernel does not show us what PrivateFacts has
    plain: bool = True  # its user may trace it as far as the kernel is concerned: no set-uid program, not undumpable
    capable: bool = False  # not plain only because of capabilities, which count if it is in our user namespace
    job: str = ""  # the batch job that the kernel's control groups put it into
    job_step: str = ""  # by them, or as its environment says
    pod: str = ""  # the UID of the Kubernetes pod, likewise
    container: Container | None = None  # likewise, as far as the path tells
    names: Names | None = None  # what Kubernetes calls them
    credentials: Credentials | None = None  # what a decision about it rests on, compared later
    trace_parent: str = ""  # W3C trace context in which it was started
    resource: Mapping[str, str] = field(default_factory=dict)  # OpenTelemetry's attributes, as its environment has them

    def with_private(self, private: "PrivateFacts") -> "ProcessFacts":
        """The same with what somebody else could read, unless that was of another program by then."""
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
    framework: Framework = ""  # as ProcessFacts has it
    plugins: tuple[str, ...] = ()  # likewise
    own_user_namespace: bool = False  # as in a container that its user has started
    uid: int | None = None  # whose it was then; None: not known
    program: str = ""  # as Credentials has it
    trace_parent: str = ""  # as ProcessFacts has them
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
    name, _, rest = stat[stat.index(b"(") + 1 :].rpartition(b")")  # the name may hold anything
    fields = rest.split()
    if fields[_STAT_STATE] in (b"Z", b"X", b"x"):
        return None
    arguments = _command(folder)  # none: a thread of the kernel
    command = arguments or [os.fsdecode(name)]
    named_python = _PYTHON.fullmatch(_base_name(command[0])) is not None
    private, rights = _read_with_rights(pid, folder, proc, signs, named_python=named_python)
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
    """Both of one program, or nothing private. Raises OSError.

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
        trace_parent=telemetry_variables.trace_parent(environ),
        resource=telemetry_variables.resource(environ),
    )


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is none. Asked once a minute: the databases may be on the network.

    Blocks as they do.
    """
    return _name_in_this_minute(uid, int(time.monotonic() / KEEP_NAMES_S))


@functools.lru_cache(maxsize=4096)
def _name_in_this_minute(uid: int, _minute: int) -> str:
    with contextlib.suppress(KeyError, OSError):
        return clean(pwd.getpwuid(uid).pw_name, 64)
    return str(uid)


def _command(folder: ProcessFolder) -> list[str]:
    """A process that has changed its title may have left out the zeros between and behind the arguments."""
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
    """Whether the kernel refuses what only those who may trace the process can read."""
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
    """The first arguments, as far as they fit."""
    clipped: list[str] = []
    room = _MAX_COMMAND_CHARS
    for argument in command:
        if room <= 0:
            break
        clipped.append(clean(argument, room))
        room -= len(argument) + 1
    return tuple(clipped)


def foreign_pids(proc: Path = PROC) -> set[int]:
    """Every process of this PID namespace but this daemon and its workers."""
    own = psutil.Process()
    everything = {int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()}
    return everything - {own.pid} - {child.pid for child in own.children()}


def open_gpus(folder: ProcessFolder) -> tuple[int, ...]:
    """The numbers of the GPUs that the process has open; empty if that may not be read.

    NVIDIA's are the minors of /dev/nvidiaN; those of AMD's and Intel's render nodes are as drm_gpus says.
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
    """The variables that count; of one that is there twice the first, as getenv has it."""
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
