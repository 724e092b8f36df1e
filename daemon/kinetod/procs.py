"""What the kernel says of processes: owner, command, GPUs, launcher. Blocking; call it in a thread."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from kinetod.access.jobs import job_of
from kinetod.identity import PROC, ProcessKey, start_time_ns
from kinetod.text import clean

_GPU_DEVICE = re.compile(r"/dev/nvidia(\d+)")
_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]*")
_MAX_COMMAND_CHARS = 4096  # thousands of processes must fit into one message
_INT32_MAX = 2**31 - 1
# First match wins: torchrun and friends, then the launchers that only number their tasks.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
JOB_ID_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")


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
    parent_pid: int = 0
    is_ours: bool = False  # kinetoctl, kinetod and its helpers, of whatever daemon
    hidden: bool = False  # the kernel does not show us what PrivateFacts has
    plain: bool = True  # its user may trace it as far as the kernel is concerned: no set-uid program, not undumpable
    capable: bool = False  # not plain only because of capabilities, which count if it is in our user namespace
    job: str = ""  # the batch job that the kernel's control groups put it into

    def with_private(self, private: "PrivateFacts") -> "ProcessFacts":
        """The same with what somebody else could read."""
        return replace(
            self,
            gpus=private.gpus,
            rank=private.rank,
            world_size=private.world_size,
            job_id=private.job_id,
            is_python=self.is_python or private.is_python,
            hidden=False,
            plain=self.plain or (self.capable and private.own_user_namespace),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFacts:
    """What the kernel shows to the process's own user and to those who may trace it."""

    gpus: tuple[int, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    job_id: str = ""
    is_python: bool = False  # by its executable
    own_user_namespace: bool = False  # as in a container that its user has started


def read_facts(pid: int, proc: Path = PROC) -> ProcessFacts | None:
    """None if there is no such process (a zombie is none: it can never be traced)."""
    try:
        key = ProcessKey(pid, start_time_ns(pid, proc))
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return None
            uids = process.uids()
            uid = uids.effective
            user = clean(process.username(), 64)
            arguments = process.cmdline()  # none: a thread of the kernel
            command = arguments or [process.name()]
            parent_pid = process.ppid()
    except (OSError, psutil.Error, ValueError):
        return None
    private = read_private(pid, proc)
    job = job_of(pid, proc)
    dumpable = len({uids.real, uids.effective, uids.saved}) == 1 and _dumpable(pid, uid, proc)
    capable = uid != 0 and _has_capabilities(pid, proc)
    return ProcessFacts(
        key=key,
        uid=uid,
        user=user,
        command=_clipped(command),
        gpus=private.gpus,
        rank=private.rank,
        world_size=private.world_size,
        job_id=private.job_id,
        is_python=private.is_python or bool(command[0] and _PYTHON.fullmatch(Path(command[0]).name)),
        parent_pid=parent_pid,
        is_ours=_is_ours(command),
        hidden=bool(arguments) and _hidden(pid, proc),
        plain=dumpable and (not capable or private.own_user_namespace),
        capable=dumpable and capable,
        job=job.id if job is not None else "",
    )


def read_private(pid: int, proc: Path = PROC) -> PrivateFacts:
    """What may not be read is empty."""
    environ = _environ(pid, proc)
    return PrivateFacts(
        gpus=open_gpus(pid, proc),
        rank=_number(environ, RANK_VARIABLES),
        world_size=_number(environ, WORLD_SIZE_VARIABLES),
        job_id=clean(_first(environ, JOB_ID_VARIABLES), 128),
        is_python=_runs_python(pid, proc),
        own_user_namespace=_in_own_user_namespace(pid, proc),
    )


def _dumpable(pid: int, uid: int, proc: Path) -> bool:
    """The kernel gives the files of a process that is not to root; the folder's own owner says nothing of it."""
    with contextlib.suppress(OSError):
        return (proc / str(pid) / "environ").stat().st_uid == uid
    return False


def _has_capabilities(pid: int, proc: Path) -> bool:
    """Also if that cannot be told."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
        return int(next(line for line in status if line.startswith("CapPrm:")).split()[1], 16) != 0
    return True


def _in_own_user_namespace(pid: int, proc: Path) -> bool:
    with contextlib.suppress(OSError):
        return (proc / str(pid) / "ns/user").readlink() != (proc / "self/ns/user").readlink()
    return False


def _hidden(pid: int, proc: Path) -> bool:
    """Whether the kernel refuses what only those who may trace the process can read."""
    try:
        os.close(os.open(proc / str(pid) / "environ", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _is_ours(command: list[str]) -> bool:
    """`python .../kinetoctl …`, `python -m kinetod…`; not the demo's training process."""
    if command[1:2] == ["-m"]:
        return command[2:3] == ["kinetoctl"] or (command[2:3] or [""])[0].partition(".")[0] == "kinetod"
    return any(Path(argument).name in ("kinetoctl", "kinetod") for argument in command[:2])


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


def open_gpus(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Minors of the /dev/nvidiaN that the process has open; empty if that may not be read."""
    minors = set()
    with contextlib.suppress(OSError):
        for entry in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if match := _GPU_DEVICE.fullmatch(str(entry.readlink())):
                    minors.add(int(match[1]))
    return tuple(sorted(minor for minor in minors if minor <= _INT32_MAX))


def _environ(pid: int, proc: Path) -> dict[str, str]:
    wanted = {*RANK_VARIABLES, *WORLD_SIZE_VARIABLES, *JOB_ID_VARIABLES}
    with contextlib.suppress(OSError):
        text = (proc / str(pid) / "environ").read_bytes().decode("utf-8", "replace")
        pairs = (entry.partition("=") for entry in text.split("\0"))
        return {name: value for name, _, value in pairs if name in wanted}
    return {}


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    text = _first(environ, names)
    return int(text) if text.isascii() and text.isdecimal() and int(text) <= _INT32_MAX else None


def _runs_python(pid: int, proc: Path) -> bool:
    with contextlib.suppress(OSError):
        return _PYTHON.fullmatch((proc / str(pid) / "exe").readlink().name) is not None
    return False
