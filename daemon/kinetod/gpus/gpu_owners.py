"""Maps GPUs to the containers and batch jobs that use them (by processes on the GPU) or hold them (according to
others).

A container that the kubelet lists with GPUs has the kubelet's names, and owns the GPUs even without a process. For
others, names come from a process's environment; they are cached as long as the container is on a GPU. Jobs come from a
folder that the cluster maintains, and from the environments of Slurm's tasks. The kernel knows none of these variables,
and a process may change them, so they are for display, not for decisions.

Environments are read in a thread with a deadline, since a hostile process can block its reader; other users' can be
read only by root or with CAP_SYS_PTRACE.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import GpuProcess, GpuState, Snapshot
from kinetod.kubernetes.pod_names import Held, called, matched
from kinetod.processes.containers import PROC, Container, Names, container_of, names_of
from kinetod.processes.identity import ProcessFolder, ProcessKey, start_time_ns
from kinetod.supervise.thread_deadline import WithinDeadline

NAMES_DEADLINE_S = 0.2
ACCOUNT_VARIABLE, PARTITION_VARIABLE = "SLURM_JOB_ACCOUNT", "SLURM_JOB_PARTITION"
_MAX_CHARS = 128
DEADLINE_S = 0.2  # the folder may be on a network
MAX_FILES = 1024
MAX_BYTES = 1 << 14
MAX_JOBS = 64
_MAX_ID_CHARS = 128

Jobs = Mapping[str, tuple[str, ...]]  # by the name of the GPU's file


# Maps GPUs to batch jobs, from a folder that the cluster's prolog and epilog maintain. The form is that of
# dcgm-exporter (--hpc-job-mapping-dir), so that one folder serves both: a file for each GPU, named by its index,
# `INDEX.SLICE` for a part of it, or its UUID; containing the ids of the jobs that it is allocated to, one per line.
# Only the cluster knows this: a job that does not use its GPU has no process there.
class JobFolder:
    """Call it for the folder's current content; empty if there is no folder, or it hangs. Thread-safe."""

    def __init__(self, folder: Path, *, deadline_s: float = DEADLINE_S) -> None:
        self._folder = folder
        self._deadline_s = deadline_s
        self._reading = WithinDeadline("jobs of GPUs", self._read)

    def __call__(self) -> Jobs:
        """The jobs by the names of the GPUs' files."""
        with contextlib.suppress(OSError, TimeoutError):
            return self._reading.get(self._deadline_s)
        return {}

    def _read(self) -> Jobs:
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(MAX_FILES), strict=False)]
        return {name: jobs for name in names if (jobs := _jobs_in(self._folder / name))}


def jobs_of(gpu: GpuState, jobs: Jobs) -> list[str]:
    """The jobs to which the GPU or a part of it is allocated."""
    names = [name for name in jobs if gpu.uuid == name or str(gpu.index) == name.partition(".")[0]]
    return sorted({job for name in names for job in jobs[name]})


def _jobs_in(path: Path) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, MAX_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        finally:
            os.close(descriptor)
        ids = (clean(line, _MAX_ID_CHARS) for line in text.decode("utf-8", "replace").splitlines() if line.strip())
        return tuple(dict.fromkeys(ids))[:MAX_JOBS]
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNames:
    """Names from a process's environment; empty if missing."""

    account: str = ""
    partition: str = ""


Said = Mapping[int, SlurmNames]  # by pid


class SlurmVariables:
    """Maps each process on the GPUs of a snapshot to its Slurm variables; omits processes that cannot be read."""

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
        # A late answer belongs to an earlier question: by now, a pid may be another process.
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
    """Names on which all processes agree; empty if they differ or one of them cannot be read."""
    names = {said.get(process.pid, SlurmNames()) for process in processes}
    accounts, partitions = {each.account for each in names}, {each.partition for each in names}
    return SlurmNames(
        account=accounts.pop() if len(accounts) == 1 else "",
        partition=partitions.pop() if len(partitions) == 1 else "",
    )


def _names_in(environ: bytes) -> SlurmNames:
    """Names in the text of /proc/PID/environ; the first counts if a variable occurs twice, as in getenv."""
    values: dict[bytes, bytes] = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        values.setdefault(name, value)

    def text(variable: str) -> str:
        return clean(values.get(variable.encode(), b"").decode("utf-8", "replace"), _MAX_CHARS)

    return SlurmNames(account=text(ACCOUNT_VARIABLE), partition=text(PARTITION_VARIABLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuContainer:
    """A container that has or uses a GPU. Empty values produce no label."""

    pod: str = ""
    namespace: str = ""
    container: str = ""
    container_id: str = ""
    runtime: str = ""
    pod_uid: str = ""


Owners = Mapping[str, Sequence[GpuContainer]]  # by the GPU's UUID


class ContainerOwners:
    """Maps each GPU of a snapshot to its owners. Thread-safe. held: allocations as the kubelet reports them."""

    def __init__(
        self,
        hostname: str,
        *,
        held: Callable[[], Held] = dict,
        proc: Path = PROC,
        deadline_s: float = NAMES_DEADLINE_S,
    ) -> None:
        self._hostname = hostname
        self._held = held
        self._proc = proc
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._wanted: dict[Container, int] = {}  # containers in pods, each with one of its processes
        self._names: dict[Container, Names] = {}
        self._reading = WithinDeadline("names of containers", self._read)

    def __call__(self, snapshot: Snapshot) -> Owners:
        """The containers of each GPU, by its UUID; GPUs without any are left out."""
        found: dict[str, dict[Container, int]] = {}
        for gpu in snapshot.gpus:
            for process in gpu.processes:
                if (container := container_of(process.pid, self._proc)) is not None:
                    found.setdefault(gpu.uuid, {}).setdefault(container, process.pid)
        in_pods = {each: pid for users in found.values() for each, pid in users.items() if each.pod_uid}
        held = _by_uuid(snapshot, self._held())
        refs = matched({each: [uuid for uuid, users in found.items() if each in users] for each in in_pods}, held)
        names = {**self._names_of(in_pods), **{container: called(ref) for container, ref in refs.items()}}
        owners = {uuid: [_owner(each, names.get(each, Names())) for each in users] for uuid, users in found.items()}
        for uuid, holders in held.items():
            users = found.get(uuid, {})
            if users.keys() <= refs.keys():  # otherwise one of these holders may be among them
                idle = sorted(set(holders) - {refs[each] for each in users})
                owners.setdefault(uuid, []).extend(_owner(Container(), called(ref)) for ref in idle)
        return owners

    def _names_of(self, wanted: Mapping[Container, int]) -> Mapping[Container, Names]:
        with self._lock:
            self._wanted = dict(wanted)
            new = wanted.keys() - self._names.keys()
        if new:
            with contextlib.suppress(TimeoutError):
                self._reading.get(self._deadline_s)
        with self._lock:
            self._names = {each: names for each, names in self._names.items() if each in wanted}
            return dict(self._names)

    def _read(self) -> None:
        with self._lock:
            new = {each: pid for each, pid in self._wanted.items() if each not in self._names}
        for container, pid in new.items():
            names = names_of(pid, self._hostname, self._proc)
            with self._lock:
                self._names[container] = names


def _by_uuid(snapshot: Snapshot, held: Held) -> Held:
    """The kubelet's allocations for the GPUs of a snapshot, however their device plug-in names them."""
    found = {}
    for gpu in snapshot.gpus:
        if holders := next((held[name] for name in _names(gpu) if name in held), None):
            found[gpu.uuid] = holders
    return found


def _names(gpu: GpuState) -> tuple[str, ...]:
    domain, _, rest = gpu.pci_bus_id.lower().partition(":")
    return gpu.uuid, f"{domain[-4:]}:{rest}", gpu.device


def _owner(container: Container, names: Names) -> GpuContainer:
    return GpuContainer(
        pod=names.pod,
        namespace=names.namespace,
        container=names.container,
        container_id=container.id,
        runtime=container.runtime,
        pod_uid=container.pod_uid,
    )
