"""Maps GPUs to the containers that use them (by processes on the GPU) or hold them (according to the kubelet).

A container that the kubelet lists with GPUs has the kubelet's names, and owns the GPUs even without a process. For
others, names come from a process's environment. These are read in a thread with a deadline, since a hostile process can
block its reader; they are cached as long as the container is on a GPU.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kinetod.gpus.gpu_types import GpuState, Snapshot
from kinetod.kubernetes.pod_names import Held, called, matched
from kinetod.processes.containers import PROC, Container, Names, container_of, names_of
from kinetod.supervise.thread_deadline import WithinDeadline

NAMES_DEADLINE_S = 0.2


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
