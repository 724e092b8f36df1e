"""Who is on which GPU, and whose counters a caller may have.

A GPU's counters tell of all its processes, and whoever samples them keeps others from it. So a caller must have the
right to trace every process that is on it; a GPU on which nobody is, or of which nobody tells who is, is for those who
may trace everything.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kinetod.gpus.context_holders import DEADLINE_S
from kinetod.gpus.gpu_reader import MAX_AGE_S, GpuReader
from kinetod.gpus.gpu_types import GpuQuestion
from kinetod.permissions.role_policy import Action, Caller, may, sees_all
from kinetod.selection.process_registry import Registry


@dataclass(frozen=True, slots=True)
class UsedGpu:
    """A GPU and the processes that have a context on it. index: in the order of the PCI bus."""

    uuid: str
    index: int
    name: str
    pids: frozenset[int]


class GpuAccess:
    """Asks the driver who is where, and decides."""

    def __init__(self, registry: Registry, gpus: GpuReader) -> None:
        self._registry = registry
        self._gpus = gpus

    async def used(self, *, max_age_s: float = MAX_AGE_S, deadline_s: float = DEADLINE_S) -> Mapping[str, UsedGpu]:
        """Every GPU that the driver knows, as of at most max_age_s ago; none if the driver does not answer in time."""
        snapshot = await asyncio.to_thread(
            lambda: self._gpus.read(max_age_s=max_age_s, deadline_s=deadline_s, question=GpuQuestion.PROCESSES)
        )
        return {
            gpu.uuid: UsedGpu(gpu.uuid, gpu.index, gpu.name, frozenset(each.pid for each in gpu.processes))
            for gpu in snapshot.gpus
        }

    async def strange(self, uuids: Iterable[str], caller: Caller) -> set[str]:
        """Those of these GPUs whose counters the caller may not have."""
        if sees_all(caller, Action.SAMPLE_COUNTERS):
            return set()
        used = await self.used()
        on = {uuid: used[uuid].pids if uuid in used else frozenset[int]() for uuid in uuids}
        found = await self._registry.candidates({pid for pids in on.values() for pid in pids})
        mine = {each.key.pid for each in found if may(caller, Action.SAMPLE_COUNTERS, each.thing())}
        return {uuid for uuid, pids in on.items() if not pids or pids - mine}


def why_strange(caller: Caller, index: int | None) -> str:
    """Why the caller may not have the counters of a GPU."""
    number = "" if index is None else f" {index}"
    return (
        f"{caller} may not sample GPU{number}: its counters tell of all its processes, which must be there and be "
        "processes that the caller may trace; the role admin may sample any"
    )
