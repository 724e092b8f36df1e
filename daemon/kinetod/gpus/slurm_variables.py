"""What the processes on the GPUs say of their Slurm job: the account and partition in their environments.

Slurm sets the variables for a job's tasks, and the kernel knows neither. A process may choose both, so they are for
people to read and decide nothing. Environments are read in a thread with a deadline, since a hostile process can let
its reader wait; other users' can be read only by root or with CAP_SYS_PTRACE.
"""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import GpuProcess, Snapshot
from kinetod.processes.identity import ProcessKey, start_time_ns
from kinetod.processes.proc_folder import PROC, ProcessFolder
from kinetod.supervise.thread_deadline import WithinDeadline

DEADLINE_S = 0.2
ACCOUNT_VARIABLE, PARTITION_VARIABLE = "SLURM_JOB_ACCOUNT", "SLURM_JOB_PARTITION"
_MAX_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNames:
    """Empty: the process does not say it."""

    account: str = ""
    partition: str = ""


Said = Mapping[int, SlurmNames]  # by pid


class SlurmVariables:
    """Called with a snapshot of the GPUs: what each process on them says; those that cannot be read are left out."""

    def __init__(self, *, proc: Path = PROC, deadline_s: float = DEADLINE_S) -> None:
        self._proc = proc
        self._deadline_s = deadline_s
        self._wanted: Collection[int] = ()
        self._reading = WithinDeadline("Slurm's variables", self._read)

    def __call__(self, snapshot: Snapshot) -> Said:
        """Blocks for `deadline_s` at most."""
        self._wanted = frozenset(process.pid for gpu in snapshot.gpus for process in gpu.processes)
        found: Mapping[ProcessKey, SlurmNames] = {}
        if self._wanted:
            with contextlib.suppress(TimeoutError):
                found = self._reading.get(self._deadline_s)
        # A late answer is to an earlier question: by now, a pid may be another process.
        return {key.pid: names for key, names in found.items() if self._key(key.pid) == key}

    def _read(self) -> Mapping[ProcessKey, SlurmNames]:
        found = {}
        for pid in self._wanted:
            with contextlib.suppress(OSError), ProcessFolder(pid, self._proc) as folder:
                if (key := self._key(pid)) is not None:
                    found[key] = _names_in(folder.read("environ"))
        return found

    def _key(self, pid: int) -> ProcessKey | None:
        with contextlib.suppress(OSError):
            return ProcessKey(pid, start_time_ns(pid, self._proc))
        return None


def agreed(processes: Collection[GpuProcess], said: Said) -> SlurmNames:
    """What all of them say; nothing where they differ or one of them cannot be read."""
    names = {said.get(process.pid, SlurmNames()) for process in processes}
    accounts, partitions = {each.account for each in names}, {each.partition for each in names}
    return SlurmNames(
        account=accounts.pop() if len(accounts) == 1 else "",
        partition=partitions.pop() if len(partitions) == 1 else "",
    )


def _names_in(environ: bytes) -> SlurmNames:
    """By the text of /proc/PID/environ; of a variable that is there twice the first, as getenv has it."""
    values: dict[bytes, bytes] = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        values.setdefault(name, value)

    def text(variable: str) -> str:
        return clean(values.get(variable.encode(), b"").decode("utf-8", "replace"), _MAX_CHARS)

    return SlurmNames(account=text(ACCOUNT_VARIABLE), partition=text(PARTITION_VARIABLE))
