"""GPUs that several users share, for tests of who may have their counters."""

import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from kinetod.gpus.gpu_types import GpuProcess, GpuState, Snapshot
from kinetod.permissions.role_policy import Resource


class SharedGpus:
    """Stands for GpuReader and Registry. on: the pids on each GPU. owners: the users of those that are known.
    late: the driver does not answer any more.
    """

    def __init__(self, *on: tuple[int, ...], owners: Mapping[int, int]) -> None:
        self.on = on
        self.reads = 0
        self.late = False
        self.owners = dict(owners)

    def read(self, **_: object) -> Snapshot:
        """The GPUs and who is on them."""
        self.reads += 1
        if self.late:
            return Snapshot()
        gpus = [
            GpuState(
                vendor="nvidia", index=number, uuid=f"GPU-{number}", name="A GPU",
                processes=tuple(GpuProcess(pid=pid) for pid in pids),
            )
            for number, pids in enumerate(self.on)
        ]  # fmt: skip
        return Snapshot(gpus=tuple(gpus), time_ns=time.time_ns())

    async def candidates(self, pids: Iterable[int]) -> list[Any]:
        """The known ones of these processes."""

        def one(pid: int) -> Any:
            return SimpleNamespace(key=SimpleNamespace(pid=pid), resource=lambda: Resource(uid=self.owners[pid]))

        return [one(pid) for pid in pids if pid in self.owners]
