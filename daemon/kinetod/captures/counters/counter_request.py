"""Checks a caller's request for counters, field by field, and decides which GPUs' counters the caller may read.

Only `with_plan` asks kinetod-counters, and `GpuAccess` the driver, for the processes on each GPU.

A GPU's counters cover all its processes, and sampling them keeps others from doing so. So a caller must have the right
to trace every process on it; a GPU without processes, or with unknown ones, is reserved for callers who may trace
everything.

Access is checked again during a sampling (`AccessWatch`), since others may begin to use its GPU at any time. Changes
between two checks go unnoticed. So the caller gets the samples up to the last check that found nobody else.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration

from kinetod.base.errors import InvalidRequest, Reason, invalid
from kinetod.counters.counter_client import CounterClient
from kinetod.counters.interface import (
    DEFAULT_INTERVAL_NS,
    OVERVIEW,
    SETS,
    CounterCode,
    CounterError,
    WantedCounters,
    check_interval,
    checked_wanted,
)
from kinetod.gpus.gpu_reader import HOLDERS_DEADLINE_S, MAX_AGE_S, GpuReader
from kinetod.gpus.gpu_types import GpuQuestion, Snapshot
from kinetod.permissions.role_policy import Action, Caller, may, sees_all
from kinetod.selection.process_registry import Registry

MAX_SAMPLES = 1_000_000  # per GPU in a trace: about 320 MB of rows with eight metrics
PLAN_S = 5.0
_MAX_NAME_CHARS = 128
SINCE = "samples since its processes were last checked are left out"


@dataclass(frozen=True, slots=True)
class UsedGpu:
    """A GPU and the processes that have a context on it. index: in the order of the PCI bus."""

    uuid: str
    index: int
    name: str
    pci_bus_id: str
    pids: frozenset[int]


class GpuAccess:
    """Asks the driver for the processes on GPUs, and decides about access."""

    def __init__(self, registry: Registry, gpus: GpuReader) -> None:
        self._registry = registry
        self._gpus = gpus

    async def used(
        self, *, max_age_s: float = MAX_AGE_S, deadline_s: float = HOLDERS_DEADLINE_S
    ) -> Mapping[str, UsedGpu]:
        """Every GPU that the driver lists, as of at most max_age_s ago; none if the driver does not answer in time."""

        def read() -> Snapshot:
            return self._gpus.read(max_age_s=max_age_s, deadline_s=deadline_s, question=GpuQuestion.PROCESSES)

        asked_ns = time.time_ns()
        snapshot = await asyncio.to_thread(read)
        if not max_age_s and 0 < snapshot.time_ns < asked_ns:  # an answer to an earlier caller who did not wait for it
            snapshot = await asyncio.to_thread(read)
        return {
            gpu.uuid: UsedGpu(
                gpu.uuid, gpu.index, gpu.name, gpu.pci_bus_id, frozenset(each.pid for each in gpu.processes)
            )
            for gpu in snapshot.gpus
        }

    async def strange(self, uuids: Iterable[str], caller: Caller) -> set[str]:
        """Those of these GPUs whose counters the caller may not read."""
        if sees_all(caller, Action.SAMPLE_COUNTERS):
            return set()
        used = await self.used()
        on = {uuid: used[uuid].pids if uuid in used else frozenset[int]() for uuid in uuids}
        _, mine = await self._whose(on.values(), caller)
        return {uuid for uuid, pids in on.items() if not pids or pids - mine}

    async def joined(self, used: Iterable[UsedGpu], caller: Caller, before: Collection[int]) -> set[str]:
        """Those of these GPUs with a process that the caller may not trace. A process of `before` may have ended."""
        on = {gpu.uuid: gpu.pids for gpu in used}
        there, mine = await self._whose(on.values(), caller)
        known = mine | (set(before) - there)
        return {uuid for uuid, pids in on.items() if pids - known}

    async def _whose(self, on: Iterable[frozenset[int]], caller: Caller) -> tuple[set[int], set[int]]:
        """Those of these processes that exist, and those that the caller may trace."""
        found = await self._registry.candidates({pid for pids in on for pid in pids})
        mine = {each.key.pid for each in found if may(caller, Action.SAMPLE_COUNTERS, each.resource())}
        return {each.key.pid for each in found}, mine


class AccessWatch:
    """Checks whether a caller may still read the counters of the sampled GPUs."""

    def __init__(self, access: GpuAccess, caller: Caller) -> None:
        self.matters = not sees_all(caller, Action.SAMPLE_COUNTERS)  # whether anything can be refused
        self._access = access
        self._caller = caller
        self._permitted_ns: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._latest: tuple[float, Mapping[str, UsedGpu]] = (float("-inf"), {})

    def begin(self, uuids: Iterable[str], time_ns: int) -> None:
        """Adds GPUs that the caller may read. time_ns: Unix time at which the driver was asked for their processes."""
        self._permitted_ns = dict.fromkeys(uuids, time_ns)

    @property
    def refused(self) -> Mapping[str, str]:
        """The GPUs that the caller may no longer read, and why; samples up to `permitted_ns` remain the caller's."""
        return self._refused

    @property
    def permitted_ns(self) -> Mapping[str, int]:
        """Unix time of the last check of each GPU without other users; empty for callers who may read all."""
        return self._permitted_ns if self.matters else {}

    async def look(self, targets: Collection[int], *, deadline_s: float = HOLDERS_DEADLINE_S) -> Mapping[str, UsedGpu]:
        """Checks the processes on the GPUs now, and refuses GPUs with another user's.

        Concurrent callers wait for the next check, which serves all of them. targets: pids that may have ended. Returns
        the result of `GpuAccess.used`.
        """
        came = time.monotonic()
        async with self._lock:
            if self._latest[0] < came:
                began, began_ns = time.monotonic(), time.time_ns()
                used = await self._access.used(max_age_s=0.0, deadline_s=deadline_s)
                if self.matters:
                    await self._judge(used, targets, began_ns)
                self._latest = began, used
            return self._latest[1]

    async def _judge(self, used: Mapping[str, UsedGpu], targets: Collection[int], time_ns: int) -> None:
        seen = [used[uuid] for uuid in self._permitted_ns if uuid in used and uuid not in self._refused]
        joined = await self._access.joined(seen, self._caller, targets)
        for gpu in seen:
            if gpu.uuid in joined:
                self._refused[gpu.uuid] = f"{why_strange(self._caller, gpu.index)}; {SINCE}"
            else:
                self._permitted_ns[gpu.uuid] = time_ns

    def refuse(self, gpus: Iterable[UsedGpu]) -> None:
        """Rejects the GPUs whose users were unknown when sampling began."""
        for gpu in gpus:
            if gpu.uuid in self._permitted_ns and self.matters:
                self._refused.setdefault(gpu.uuid, f"the driver did not report who uses GPU {gpu.index}; {SINCE}")


def why_strange(caller: Caller, index: int | None) -> str:
    """Why the caller may not read the counters of a GPU."""
    number = "" if index is None else f" {index}"
    return (
        f"{caller} is not allowed to sample GPU{number}: its counters cover all processes on it, so the caller must be "
        "allowed to see and trace each of them; the role admin may sample any GPU"
    )


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """What to sample. interval_ns: 0: each GPU's default. silent: kinetod-counters did not answer within PLAN_S."""

    wanted: WantedCounters
    interval_ns: int
    silent: bool = False


def checked_sampling(set_name: str, metrics: Sequence[str], interval_ns: int, path: str = "") -> SamplingRequest:
    """The request, with the default in place of an empty set. path: of the fields. Raises InvalidRequest."""
    wanted = WantedCounters(set_name=set_name or ("" if metrics else OVERVIEW), metrics=tuple(metrics))
    try:
        checked_wanted(wanted, tuple(SETS))
    except CounterError as exc:
        raise invalid(f"{path}set" if set_name else f"{path}metrics", exc.reason) from exc
    if any(len(name) > _MAX_NAME_CHARS for name in wanted.metrics):
        raise invalid(f"{path}metrics", f"a name is longer than {_MAX_NAME_CHARS} characters")
    try:
        if interval_ns:
            check_interval(interval_ns)
    except CounterError as exc:
        raise invalid(f"{path}interval_ns", exc.reason) from exc
    return SamplingRequest(wanted, interval_ns)


def checked_counters(spec: pb.CaptureSpec) -> SamplingRequest | None:
    """The counters that a capture requests; None: none. Raises InvalidRequest."""
    if not spec.HasField("counters"):
        return None
    asked = spec.counters
    request = checked_sampling(asked.set, asked.metrics, asked.interval_ns, "spec.counters.")
    length_ns = spec.duration_ns + spec.warmup_ns
    interval_ns = request.interval_ns or DEFAULT_INTERVAL_NS
    if length_ns > MAX_SAMPLES * interval_ns:
        least_ns = -(-length_ns // MAX_SAMPLES)
        raise invalid(
            "spec.counters.interval_ns",
            f"{format_duration(length_ns)} at intervals of {format_duration(interval_ns)} exceeds the {MAX_SAMPLES:,} "
            f"samples that a trace can hold; use {format_duration(least_ns)} or longer",
        )
    return request


async def with_plan(client: CounterClient, request: SamplingRequest) -> SamplingRequest:
    """Returns the request, noting whether kinetod-counters answers.

    Raises InvalidRequest for counters that no GPU of this host can measure in one pass. Other problems with counters
    are no reason to refuse a capture, which runs without them.
    """
    try:
        async with asyncio.timeout(PLAN_S):
            with contextlib.suppress(CounterError):
                await _check_plan(client, request)
    except TimeoutError:
        return replace(request, silent=True)
    return request


async def _check_plan(client: CounterClient, request: SamplingRequest) -> None:
    """Raises InvalidRequest or CounterError if the request cannot be measured."""
    refused: CounterError | None = None
    for gpu in {each.chip: each for each in (await client.gpus()).gpus if not each.problem}.values():
        try:
            await client.plan(gpu.uuid, request.wanted)
        except CounterError as exc:
            if exc.code is not CounterCode.INVALID_METRIC:
                raise
            refused = exc
        else:
            return
    if refused is not None:
        field = "spec.counters.metrics" if request.wanted.metrics else "spec.counters.set"
        raise InvalidRequest(Reason.COUNTERS_INVALID_METRIC, f"{field}: {refused.reason}", field=field)
