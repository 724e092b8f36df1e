"""A training job of many ranks made by hand: tensor-parallel groups in hosts, a data-parallel group over hosts.

    write_job(folder, Job(ranks=16, slow={5: 1.1}, late={9: 300}))

Kernels run one after the other on each GPU; a collective begins when a rank reaches it and ends on all of its ranks
together, some time after the last one has come.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support.trace_files.ranks import Event, document, event, launched, nccl, step

KERNEL = "ncclDevKernel_{}_Sum_bf16_RING_{}(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"


@dataclass(frozen=True, kw_only=True)
class Job:
    """slow: rank -> its kernels take so many times as long; late: rank -> its host is so many us late in each step.

    clock_us: host -> how far its clock is ahead. clocks: host -> what the traces say of it (ns).
    """

    ranks: int = 16
    per_host: int = 4
    steps: int = 6
    layers: int = 8
    slow: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    clock_us: Mapping[int, float] = field(default_factory=dict)
    clocks: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


class _Rank:
    def __init__(self, rank: int, job: Job) -> None:
        self.rank, self.job = rank, job
        self.random = np.random.default_rng(rank)
        self.now, self.correlation = 1000.0, 0
        self.events: list[Event] = []
        self.numbers: dict[str, int] = {}

    def compute(self, us: float) -> None:
        """Adds one kernel."""
        us *= self.job.slow.get(self.rank, 1.0) * (1 + 0.01 * float(self.random.random()))
        self._launch(GEMM, us)
        self.now += us + 1

    def collective(
        self, name: str, kernel: str, elements: int, group: Sequence[int], group_name: str, end: float
    ) -> None:
        """Adds a collective that lasts from now to `end`."""
        self.numbers[group_name] = self.numbers.get(group_name, 0) + 1
        arguments = nccl(name, elements, group, self.numbers[group_name], name=group_name, dtype="BFloat16")
        arguments["Process Group Description"] = "default_pg" if group_name == "0" else "mesh_tp"
        self._launch(kernel, end - self.now, 20, **arguments)
        self.now = end + 1

    def _launch(self, kernel: str, us: float, stream: int = 7, **arguments: Any) -> None:
        self.correlation += 1
        self.events += launched(kernel, self.now - 8, self.now, us, self.correlation, stream=stream, **arguments)


def events_of(job: Job) -> list[list[Event]]:
    """Events of each rank, by its own host's clock."""
    ranks = [_Rank(number, job) for number in range(job.ranks)]
    hosts = [ranks[first : first + job.per_host] for first in range(0, job.ranks, job.per_host)]
    for number in range(job.steps):
        began = [rank.now for rank in ranks]
        for rank in ranks:
            rank.now += 60 + job.late.get(rank.rank, 0.0)
            rank.events.append(event("cpu_op", "aten::linear", rank.now - 55, 40, **{"External id": number + 1}))
        for _layer in range(job.layers):
            for rank in ranks:
                rank.compute(200)
            for place, host in enumerate(hosts):
                _meet(host, "allreduce", KERNEL.format("AllReduce", "LL128"), 1 << 20, str(10 + place), 40)
        for bucket in range(4):
            _meet(ranks, "allreduce", KERNEL.format("AllReduce", "SIMPLE"), (1 << 22) << bucket, "0", 60.0 * 2**bucket)
        for rank, begin in zip(ranks, began, strict=True):
            rank.events.append(step(number + 1, begin, rank.now - begin))
    return [[_moved(each, job.clock_us.get(rank.rank // job.per_host, 0.0)) for each in rank.events] for rank in ranks]


def _meet(ranks: Sequence[_Rank], name: str, kernel: str, elements: int, group_name: str, transfer_us: float) -> None:
    group = [rank.rank for rank in ranks]
    end = max(rank.now for rank in ranks) + transfer_us
    for rank in ranks:
        rank.collective(name, kernel, elements, group, group_name, end + 0.5 * float(rank.random.random()))


def _moved(entry: Event, us: float) -> Event:
    return {**entry, "ts": entry["ts"] + us}


def documents(job: Job) -> list[dict[str, Any]]:
    """The file of each rank."""
    found = []
    for rank, events in enumerate(events_of(job)):
        host = rank // job.per_host
        made = document(events, rank=rank, size=job.ranks, host=f"gpu-{host}")
        if host in job.clocks:
            made["kinetod"] = dict(job.clocks[host])
        found.append(made)
    return found


def write_job(folder: Path, job: Job) -> list[Path]:
    """Writes one file for each rank."""
    paths = []
    for rank, made in enumerate(documents(job)):
        path = folder / f"rank{rank}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(made).encode(), 1))
        paths.append(path)
    return paths
