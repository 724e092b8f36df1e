"""ListCounters and WatchCounters: hardware counters of GPUs for callers who may read them.

Theory of operation
    The caller's access to the counters of a GPU (`captures.counters.counter_request`) is checked before the sampling,
    and every LOOK_S during it: it ends when another user's process appears on the GPU.

    A caller who names no GPU watches those that have the requested counters. The answer also says why others are not
    watched.

    Samples stay in the daemon; only their means are streamed.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.array_types import Floats, Structs

from kinetod.base.errors import (
    InvalidRequest,
    KinetodError,
    NotFound,
    NotPermitted,
    Precondition,
    Reason,
    invalid,
)
from kinetod.captures.counters.capture_counters import CounterSource, left_out_metrics, metrics_of
from kinetod.captures.counters.counter_request import checked_sampling, why_strange
from kinetod.config.settings import Settings
from kinetod.counters.counter_client import CounterSession, GpuList
from kinetod.counters.interface import (
    SETS,
    CounterCode,
    CounterDevice,
    CounterError,
    WantedCounters,
)
from kinetod.counters.sample_rings import RingError
from kinetod.permissions.caller_limits import Shares
from kinetod.permissions.role_policy import Caller, Role

DEFAULT_PERIOD_NS = 10**9
LEAST_PERIOD_NS = 100_000_000
MOST_PERIOD_NS = 3600 * 10**9
TAKE_S = 0.5  # a ring has room for 8 s of 8 metrics at 100 us
LOOK_S = 5.0
MAX_WATCHES = 32
_NAMES = 4096
_LACKS = CounterCode.INVALID_METRIC


class CounterWatcher:
    """Answers the calls."""

    def __init__(self, source: CounterSource, settings: Settings) -> None:
        self._client = source.client
        self._access = source.access
        self._watches = Shares(
            Reason.TOO_MANY_WATCHERS,
            "counter watches",
            "access.max_watches_per_user",
            own=lambda: settings.current.max_watches_per_user,
            in_all=lambda: MAX_WATCHES,
        )

    async def available(self, request: pb.ListCountersRequest) -> pb.ListCountersResponse:
        """The GPUs and the counters that can be sampled on each. Raises KinetodError."""
        found = await self._found()
        response = pb.ListCountersResponse(backend=found.backend, library_version=found.library_version)
        for gpu in found.gpus:
            shown = response.gpus.add(
                gpu=pb.Gpu(index=gpu.index, uuid=gpu.uuid, name=gpu.name),
                chip=gpu.chip,
                pci_bus_id=gpu.pci_bus_id,
                reason_code=gpu.code,
                reason=gpu.problem,
            )
            if gpu.problem:
                continue
            for name in SETS:
                shown.sets.append(await self._set(gpu.uuid, name))
            if request.base_metrics:
                try:
                    shown.base_metrics.extend((await self._client.base_metrics(gpu.uuid))[:_NAMES])
                except CounterError as exc:
                    raise _refused(exc) from exc
        return response

    async def _found(self) -> GpuList:
        try:
            return await self._client.gpus()
        except CounterError as exc:
            raise _refused(exc) from exc

    async def _set(self, uuid: str, name: str) -> pb.CounterSet:
        try:
            plan = await self._client.plan(uuid, WantedCounters(set_name=name))
        except CounterError as exc:
            return pb.CounterSet(name=name, problem=exc.reason)
        return pb.CounterSet(name=name, metrics=metrics_of(plan), left_out=left_out_metrics(plan))

    async def watch(self, request: pb.WatchCountersRequest, caller: Caller) -> AsyncIterator[pb.CounterMeans]:
        """Yields means until the caller goes away, or no GPU is sampled any more. Raises KinetodError."""
        asked = checked_sampling(request.set, request.metrics, request.interval_ns)
        period_ns = request.period_ns or DEFAULT_PERIOD_NS
        if not LEAST_PERIOD_NS <= period_ns <= MOST_PERIOD_NS:
            raise invalid("period_ns", f"must be between {LEAST_PERIOD_NS} and {MOST_PERIOD_NS}, got {period_ns}")
        with self._watches.one(caller.key, caller, admin=Role.ADMIN in caller.roles):
            gpus = await self._chosen(request.gpus, caller)
            watched, lacking = await self._started(gpus, asked.wanted, asked.interval_ns, all_named=bool(request.gpus))
            try:
                async for means in self._means(watched, caller, period_ns / 1e9):
                    yield pb.CounterMeans(gpus=[*means, *lacking])
            finally:
                await asyncio.gather(*(each.end() for each in watched))

    async def _chosen(self, indexes: Collection[int], caller: Caller) -> list[CounterDevice]:
        """The GPUs to watch. Raises NotFound, NotPermitted."""
        gpus = {gpu.index: gpu for gpu in (await self._found()).gpus}
        if missing := sorted(set(indexes) - gpus.keys()):
            reason = f"there is no GPU {missing[0]}; `kinetoctl counters list` lists the GPUs"
            raise NotFound(Reason.COUNTERS_UNAVAILABLE, reason)
        if indexes:
            chosen = [gpus[index] for index in sorted(set(indexes))]
            await self._check(chosen, caller)
            return chosen
        strange = await self._access.strange([gpu.uuid for gpu in gpus.values()], caller)
        chosen = [gpu for gpu in gpus.values() if gpu.uuid not in strange]
        if not chosen and gpus:
            raise _not_yours(caller, next(iter(gpus.values())))
        usable = [gpu for gpu in chosen if not gpu.problem]
        if not usable:
            why = chosen[0].problem if chosen else "it has none"
            code = Reason(chosen[0].code) if chosen else Reason.COUNTERS_UNAVAILABLE
            raise Precondition(code, f"no GPU on this host can be sampled: {why}")
        return usable

    async def _check(self, gpus: Sequence[CounterDevice], caller: Caller) -> None:
        """Raises NotPermitted if the caller may not read these GPUs' counters."""
        strange = await self._access.strange([gpu.uuid for gpu in gpus], caller)
        for gpu in gpus:
            if gpu.uuid in strange:
                raise _not_yours(caller, gpu)

    async def _started(
        self, gpus: Sequence[CounterDevice], wanted: WantedCounters, interval_ns: int, *, all_named: bool
    ) -> "tuple[list[_WatchedGpu], list[pb.GpuCounters]]":
        """Returns the sampled GPUs, and why others, which were not named and lack the counters, are not sampled.

        Raises KinetodError if none is left, or another one cannot be sampled; then none is.
        """
        started = await asyncio.gather(
            *(self._client.start(gpu.uuid, wanted, interval_ns) for gpu in gpus), return_exceptions=True
        )
        watched = [_WatchedGpu(each) for each in started if isinstance(each, CounterSession)]
        lacking = []
        for gpu, error in zip(gpus, started, strict=True):
            if not isinstance(error, BaseException):
                continue
            if not all_named and watched and isinstance(error, CounterError) and error.code is _LACKS:
                lacking.append(pb.GpuCounters(gpu=gpu.index, uuid=gpu.uuid, reason_code=_LACKS, reason=error.reason))
                continue
            await asyncio.gather(*(each.end() for each in watched))
            raise _refused(error) if isinstance(error, CounterError) else error
        return watched, lacking

    async def _means(
        self, watched: "Sequence[_WatchedGpu]", caller: Caller, period_s: float
    ) -> AsyncIterator[list[pb.GpuCounters]]:
        looked = time.monotonic()
        due = looked + period_s
        while not all(each.ended for each in watched):
            await asyncio.sleep(min(TAKE_S, max(0.0, due - time.monotonic())))
            for each in watched:
                each.take()
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
                await self._check([each.session.gpu for each in watched], caller)
            if now >= due:
                due = max(due + period_s, now)
                yield [each.answer() for each in watched]
        yield [each.answer() for each in watched]


class _WatchedGpu:
    """A session, and the samples since the last answer."""

    def __init__(self, session: CounterSession) -> None:
        self.session = session
        self.ended = False
        self._means = SampleMeans(len(session.plan.metrics))

    def take(self) -> None:
        """Takes the available samples."""
        try:
            while len(rows := self.session.take()):
                self._means.add(rows)
            self.ended = self.session.status().ended or self.session.gone()
        except RingError:
            self.ended = True

    def answer(self) -> pb.GpuCounters:
        """The means since the last answer."""
        means, self._means = self._means, SampleMeans(len(self.session.plan.metrics))
        verdict = self.session.verdict()
        return pb.GpuCounters(
            gpu=self.session.gpu.index,
            uuid=self.session.gpu.uuid,
            start_ns=means.start_ns,
            end_ns=means.end_ns,
            samples=means.samples,
            metrics=metrics_of(self.session.plan),
            means=means.means(),
            maxima=means.maxima(),
            left_out=left_out_metrics(self.session.plan),
            lost_ns=verdict.lost_ns,
            dropped_samples=verdict.dropped_rows,
            reason_code=verdict.code if self.ended else "",
            reason=verdict.reason if self.ended else "",
        )

    async def end(self) -> None:
        """Releases the counters."""
        await self.session.stop()
        self.session.close()


def _refused(error: CounterError) -> KinetodError:
    reason = Reason(error.code.value)
    if error.code is CounterCode.INVALID_METRIC:
        return InvalidRequest(reason, error.reason, field="metrics")
    return Precondition(reason, error.reason)


def _not_yours(caller: Caller, gpu: CounterDevice) -> NotPermitted:
    return NotPermitted(Reason.NOT_YOUR_GPU, why_strange(caller, gpu.index))


# Means of samples over time, weighted by their lengths. Pure.
@dataclass(slots=True)
class SampleMeans:
    """Accumulates samples. A NaN or infinite value counts as missing, for its metric only."""

    metrics: int
    start_ns: int = 0
    end_ns: int = 0
    samples: int = 0
    _sums: Floats = field(init=False)
    _lengths: Floats = field(init=False)
    _maxima: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._sums, self._lengths = np.zeros(self.metrics), np.zeros(self.metrics)
        self._maxima = np.full(self.metrics, -np.inf)

    def add(self, rows: Structs) -> None:
        """Adds rows as `row_type` lays them out, in the order of time."""
        if not len(rows):
            return
        lengths = (rows["end_ns"] - rows["start_ns"]).astype(np.float64)[:, None]
        values = rows["values"].astype(np.float64)
        there = np.isfinite(values) & (lengths > 0)
        self._sums += np.where(there, values * lengths, 0.0).sum(axis=0)
        self._lengths += np.where(there, lengths, 0.0).sum(axis=0)
        self._maxima = np.maximum(self._maxima, np.where(there, values, -np.inf).max(axis=0))
        self.start_ns = self.start_ns or int(rows["start_ns"][0])
        self.end_ns = int(rows["end_ns"][-1])
        self.samples += len(rows)

    def means(self) -> list[float]:
        """One mean for each metric; NaN if no sample had a value."""
        return [
            float(total / length) if length else math.nan
            for total, length in zip(self._sums, self._lengths, strict=True)
        ]

    def maxima(self) -> list[float]:
        """One maximum for each metric, likewise."""
        return [float(value) if math.isfinite(value) else math.nan for value in self._maxima]
