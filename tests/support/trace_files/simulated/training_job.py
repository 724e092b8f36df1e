"""A job of several ranks that is simulated, so that what happened, and what would happen if, is known exactly.

    run = simulate(fsdp(ranks=4, late={1: 15_000}))
    run.total_us, run.events(0)

All ranks run one program: a list of operations. The host issues them one after the other; kernels run in order on a
compute stream, collectives on another one. A collective begins on a rank once the rank has reached it, and ends on all
of its ranks when the last one has come and its transfer is over. Traces are cut to the window of each rank and moved by
the error of its clock.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, Literal

import numpy as np
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.model.context import Context

from support.trace_files.ranks import Event, document, event, launched, nccl, step

LAUNCH_US = 4.0  # of host time for each launch
LATENCY_US = 5.0  # from a launch to the earliest start
KERNELS = {"all_reduce": "AllReduce_Sum_f32", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter_Sum_f32"}
SPELLINGS = {"all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation of the program. us: its duration on each rank; of a collective, that of the transfer.

    host: work of the host, in an operator if it has a name.

    fetch: a copy to pageable memory, for which the host waits in the call.

    wait: a collective before whose end the compute stream does not go on.
    """

    kind: Literal["host", "compute", "collective", "fetch", "join", "sync", "step"]
    us: tuple[float, ...] = ()
    name: str = ""
    elements: int = 0
    wait: bool = False


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """clock_us: by how much each rank's clock is ahead. begin, end: share of the run at which a rank's window does so.

    clocks: what the traces say of them (ns). recount: ranks count steps from where their windows begin. jitter_us: by
    how much ranks may leave a collective later than the first one.
    """

    ranks: int
    program: tuple[Op, ...]
    clock_us: Mapping[int, float] = field(default_factory=dict)
    begin: Mapping[int, float] = field(default_factory=dict)
    end: Mapping[int, float] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    clocks: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    numbered: bool = False
    recount: bool = False
    jitter_us: float = 20.0

    def as_fast_as_the_others(self, rank: int) -> "SimulatedJob":
        """Returns the job with each of the rank's own operations as long as the median of the other ranks'."""
        changed = []
        for op in self.program:
            if op.kind in ("host", "compute"):
                others = [us for other, us in enumerate(op.us) if other != rank]
                own = tuple(float(np.median(others)) if r == rank else us for r, us in enumerate(op.us))
                changed.append(replace(op, us=own))
            else:
                changed.append(op)
        return replace(self, program=tuple(changed))


@dataclass
class _Rank:
    host: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    began: float = 0.0
    steps: int = 0
    events: list[tuple[float, float, list[Event]]] = field(default_factory=list)


@dataclass(frozen=True)
class SimulatedRun:
    """What happened. waits_us: of each rank in collectives, beyond their transfers."""

    job: SimulatedJob
    total_us: float
    waits_us: tuple[float, ...]
    collectives: int
    ranks: tuple[_Rank, ...]

    def events(self, rank: int) -> list[dict[str, Any]]:
        """The events in the rank's window, by its own clock."""
        job = self.job
        low, high = job.begin.get(rank, 0.0) * self.total_us, job.end.get(rank, 1.0) * self.total_us + 1
        ahead = job.clock_us.get(rank, 0.0)
        return [
            {**each, "ts": each["ts"] + ahead}  # a copy
            for start, end, events in self.ranks[rank].events
            if low <= start and end <= high
            for each in events
        ]

    def context(self, rank: int) -> Context:
        """The rank's trace, loaded."""
        text = json.dumps(self.document(rank))
        return Context(load_chrome(BytesIO(text.encode()), name=f"rank{rank}.json"), rank=rank)

    def document(self, rank: int) -> dict[str, Any]:
        """The rank's file as a JSON document."""
        host = self.job.hosts[rank] if self.job.hosts else "node0"
        events = self.events(rank)
        if self.job.recount:
            steps = [each for each in events if each["name"].startswith("ProfilerStep#")]
            for number, each in enumerate(steps, start=1):
                each["name"] = f"ProfilerStep#{number}"
        found = document(events, rank=rank, size=self.job.ranks, host=host)
        return {**found, "kinetod": dict(self.job.clocks[rank])} if rank in self.job.clocks else found


def simulate(job: SimulatedJob, seed: int = 0) -> SimulatedRun:
    """Runs the program on all ranks."""
    random = np.random.default_rng(seed)
    ranks = [_Rank() for _ in range(job.ranks)]
    waits = np.zeros(job.ranks)
    collectives = 0
    for number, op in enumerate(job.program, start=1):
        if op.kind == "collective":
            collectives += 1
            _meet(job, op, ranks, waits, number, collectives, random)
        for place, rank in enumerate(ranks):
            _run(op, place, rank, number)
    total = max(max(rank.host, rank.compute, rank.communication) for rank in ranks)
    return SimulatedRun(job, total, tuple(waits.tolist()), collectives, tuple(ranks))


def _run(op: Op, place: int, rank: _Rank, number: int) -> None:
    """Runs one operation that needs no other rank."""
    if op.kind == "host":
        begin, rank.host = rank.host, rank.host + op.us[place]
        if op.name:
            rank.events.append((begin, rank.host, [event("cpu_op", op.name, begin, op.us[place])]))
    elif op.kind == "compute":
        launch = rank.host
        rank.host += LAUNCH_US
        start = max(launch + LATENCY_US, rank.compute + 1)
        rank.compute = start + op.us[place]
        events = list(launched("gemm", launch, start, op.us[place], number))
        rank.events.append((launch, rank.compute, events))
    elif op.kind == "fetch":
        began, start = rank.host, max(rank.host + LATENCY_US, rank.compute + 1)
        rank.compute = start + op.us[place]
        rank.host = rank.compute + 10
        correlation = 950_000 + number
        stream = {"pid": 0, "tid": 7, "device": 0, "stream": 7, "correlation": correlation}
        rank.events.append((began, rank.host, [
            event("cuda_runtime", "cudaMemcpyAsync", began, rank.host - began, correlation=correlation),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start, op.us[place], **stream),
        ]))  # fmt: skip
    elif op.kind == "join":
        rank.compute = max(rank.compute, rank.communication)
    elif op.kind == "sync":
        begin, rank.host = rank.host, max(rank.host, rank.compute, rank.communication) + 10
        wait = event("cuda_runtime", "cudaDeviceSynchronize", begin, rank.host - begin, correlation=900_000 + number)
        rank.events.append((begin, rank.host, [wait]))
    elif op.kind == "step":
        rank.steps += 1
        rank.events.append((rank.began, rank.host, [step(rank.steps, rank.began, rank.host - rank.began)]))
        rank.began = rank.host


def _meet(
    job: SimulatedJob, op: Op, ranks: Sequence[_Rank], waits: Any, number: int, ordinal: int,
    random: np.random.Generator,
) -> None:  # fmt: skip
    """Runs one collective on all ranks."""
    launches, starts = [], []
    for rank in ranks:
        launches.append(rank.host)
        rank.host += LAUNCH_US
        starts.append(max(launches[-1] + LATENCY_US, rank.compute + 2, rank.communication + 2))
    ready = max(starts) + op.us[0]
    arguments = nccl(SPELLINGS[op.name], op.elements, range(job.ranks), ordinal)
    if not job.numbered:
        del arguments["Seq"]
    kernel = f"ncclDevKernel_{KERNELS[op.name]}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    for place, rank in enumerate(ranks):
        end = ready + job.jitter_us * float(random.random())
        waits[place] += end - starts[place] - op.us[0]
        events = list(
            launched(kernel, launches[place], starts[place], end - starts[place], number, stream=20, **arguments)
        )
        rank.communication = end
        rank.events.append((launches[place], end, events))
        if op.wait:
            rank.compute = max(rank.compute, end)


def _times(random: np.random.Generator, us: float, ranks: int, slow: Mapping[int, float]) -> tuple[float, ...]:
    return tuple(us * slow.get(rank, 1.0) * (1 + 0.02 * float(random.random())) for rank in range(ranks))


def fsdp(
    *,
    ranks: int = 2,
    steps: int = 8,
    layers: int = 6,
    late: Mapping[int, float] | None = None,
    slow: Mapping[int, float] | None = None,
    transfer_us: float = 400.0,
    seed: int = 1,
    **options: Any,
) -> SimulatedJob:
    """Sharded training: parameters are gathered before each layer, gradients reduced after it.

    late: rank -> us that its host sleeps in each step; slow: rank -> its kernels take so many times as long.
    """
    random = np.random.default_rng(seed)
    program: list[Op] = []
    late, slow = late or {}, slow or {}

    def compute(us: float) -> None:
        program.append(Op(kind="compute", us=_times(random, us, ranks, slow)))

    def meet(name: str, us: float, *, wait: bool) -> None:
        program.append(Op(kind="collective", us=(us,) * ranks, name=name, elements=1 << 20, wait=wait))

    for _step in range(steps):
        program.append(Op(kind="host", us=tuple(50 + late.get(rank, 0.0) for rank in range(ranks))))
        for _layer in range(layers):
            meet("all_gather", transfer_us, wait=True)
            compute(900)
            compute(600)
        for _layer in range(layers):
            meet("all_gather", transfer_us, wait=True)
            compute(2500)
            meet("reduce_scatter", transfer_us * 1.2, wait=False)
        program.append(Op(kind="join"))
        compute(300)
        program += [Op(kind="sync"), Op(kind="step")]
    return SimulatedJob(ranks=ranks, program=tuple(program), **options)


def host_bound(*, late: float, ranks: int = 2, steps: int = 6, layers: int = 30, sync: bool = True) -> SimulatedJob:
    """Sharded training with layers that the host launches more slowly than the GPU runs them. late: us of rank 1."""
    layer = (
        Op(kind="host", us=(900.0,) * ranks),
        Op(kind="collective", us=(300.0,) * ranks, name="all_gather", elements=1 << 20, wait=True),
        Op(kind="compute", us=(50.0,) * ranks),
    )
    sleep = Op(kind="host", us=tuple(10.0 + late * (rank == 1) for rank in range(ranks)))
    ending = (Op(kind="sync"), Op(kind="step")) if sync else (Op(kind="step"),)
    return SimulatedJob(ranks=ranks, program=(sleep, *layer * layers, *ending) * steps)


def many_operators(
    *, ranks: int = 2, pace: Mapping[int, float] | None = None, late: Mapping[int, float] | None = None, steps: int = 10
) -> SimulatedJob:
    """Training whose hosts are in ten operators, eight times a step, of which each launches a short kernel.

    pace: rank -> its operators take so many times as long; late: rank -> us that its host sleeps in each step.
    """
    pace, late = pace or {}, late or {}
    program = [Op(kind="host", us=tuple(50.0 + late.get(rank, 0.0) for rank in range(ranks)))]
    for _layer in range(8):
        for number in range(10):
            us = tuple((20.0 + number) * pace.get(rank, 1.0) for rank in range(ranks))
            program += [Op(kind="host", us=us, name=f"aten::op{number}"), Op(kind="compute", us=(5.0,) * ranks)]
        program.append(Op(kind="collective", us=(50.0,) * ranks, name="all_reduce", elements=1 << 20, wait=True))
    program += [Op(kind="sync"), Op(kind="step")]
    return SimulatedJob(ranks=ranks, program=tuple(program) * steps)


def launched_ahead(*, late: float = 0.0, slow: float = 1.0, steps: int = 8) -> SimulatedJob:
    """Two ranks whose hosts launch the forward first and come to the all_reduce much later, while the GPU computes.

    late: us of rank 1's host, before it launches anything; slow: factor of rank 0's kernels.
    """
    program = (
        Op(kind="host", us=(50.0, 50.0 + late)),
        Op(kind="compute", us=(12_000.0 * slow, 12_000.0)),
        Op(kind="host", us=(7_000.0, 7_000.0)),
        Op(kind="compute", us=(6_000.0 * slow, 6_000.0)),
        Op(kind="collective", us=(500.0, 500.0), name="all_reduce", elements=1 << 20),
        Op(kind="join"),
        Op(kind="sync"),
        Op(kind="step"),
    )
    return SimulatedJob(ranks=2, program=program * steps)


def ddp(
    *,
    ranks: int = 4,
    steps: int = 8,
    buckets: int = 6,
    late: Mapping[int, float] | None = None,
    slow: Mapping[int, float] | None = None,
    transfer_us: float = 500.0,
    seed: int = 1,
    **options: Any,
) -> SimulatedJob:
    """Data-parallel training: gradients are reduced in buckets beside the backward pass. Options as in fsdp()."""
    random = np.random.default_rng(seed)
    program: list[Op] = []
    late, slow = late or {}, slow or {}
    for _step in range(steps):
        program.append(Op(kind="host", us=tuple(50 + late.get(rank, 0.0) for rank in range(ranks))))
        program.append(Op(kind="compute", us=_times(random, 4000, ranks, slow)))
        for _bucket in range(buckets):
            program.append(Op(kind="compute", us=_times(random, 1200, ranks, slow)))
            program.append(
                Op(kind="collective", us=(transfer_us,) * ranks, name="all_reduce", elements=1 << 20, wait=False)
            )
        program.append(Op(kind="join"))
        program.append(Op(kind="compute", us=_times(random, 500, ranks, slow)))
        program += [Op(kind="sync"), Op(kind="step")]
    return SimulatedJob(ranks=ranks, program=tuple(program), **options)
