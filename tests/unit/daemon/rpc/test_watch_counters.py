"""WatchCounters and ListCounters: who may watch which GPU, and what they get."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.spool.counter_samples import row_type
from kinetod.base.errors import InvalidRequest, KinetodError, NotFound, NotPermitted, Precondition, Reason
from kinetod.captures.counters.capture_counters import CounterSource
from kinetod.captures.counters.counter_request import GpuAccess
from kinetod.config.settings import Config, Settings
from kinetod.counters.counter_client import CounterClient
from kinetod.counters.interface import CounterCode, CounterError, Sampling
from kinetod.counters.sampler_server import SamplerService
from kinetod.permissions.role_policy import Caller, Role, Via
from kinetod.rpc import watch_counters
from kinetod.rpc.watch_counters import CounterWatcher, SampleMeans
from support.counters.in_process import InProcess
from support.counters.memory_backend import MemoryBackend
from support.counters.shared_gpus import SharedGpus
from support.waiting import soon

ME, OTHER = 1000, 1001
OWNERS = {10: ME, 11: ME, 20: OTHER}


gpus_with = partial(SharedGpus, owners=OWNERS)


@asynccontextmanager
async def watching(backend: MemoryBackend, host: SharedGpus) -> AsyncIterator[tuple[CounterWatcher, InProcess]]:
    service = SamplerService(backend, may_ask=lambda _: True, holder_of=lambda _: "ncu (process 7)")
    connections = InProcess(service)
    client = CounterClient(connections)
    access = GpuAccess(cast(Any, host), cast(Any, host))
    try:
        yield CounterWatcher(CounterSource(client, access), Settings(Config())), connections
    finally:
        await client.stop()


def run(
    host: SharedGpus, body: Callable[[CounterWatcher, InProcess], Awaitable[None]], backend: MemoryBackend | None = None
) -> None:
    async def ask() -> None:
        async with watching(backend or MemoryBackend(), host) as (watcher, connections):
            await body(watcher, connections)

    asyncio.run(ask())


def user(*roles: Role) -> Caller:
    return Caller(uid=ME, user="me", roles=frozenset(roles or (Role.OWN,)), via=Via.UNIX)


def request(*gpus: int, **more: Any) -> pb.WatchCountersRequest:
    return pb.WatchCountersRequest(gpus=gpus, **{"period_ns": 10**8, **more})


async def first(watcher: CounterWatcher, asked: pb.WatchCountersRequest, caller: Caller) -> pb.CounterMeans:
    """The first means of any samples."""
    async with aclosing(cast(AsyncGenerator[pb.CounterMeans, None], watcher.watch(asked, caller))) as stream:
        means = await stream.__anext__()
        while not any(gpu.samples for gpu in means.gpus):
            means = await stream.__anext__()
        return means


def test_a_user_watches_the_gpus_on_which_only_own_processes_are() -> None:
    async def body(watcher: CounterWatcher, connections: InProcess) -> None:
        means = await first(watcher, request(), user())
        (gpu,) = means.gpus
        assert (gpu.gpu, gpu.uuid, gpu.samples, list(gpu.means)) == (0, "GPU-0", 1, [7.0])
        assert (gpu.start_ns, gpu.end_ns, gpu.metrics[0].unit, gpu.reason_code) == (1000, 2000, "%", "")
        await soon(lambda: not connections.service.held, "the GPU is free again")

    run(gpus_with((10, 11), (10, 20)), body)


@pytest.mark.parametrize(
    ("on", "gpu"),
    [
        (((10, 20), (10,)), 0),  # somebody else's process is there, too
        (((), (10,)), 0),  # nobody's
        (((10, 99), (10,)), 0),  # of one process it is not known whose it is
        ((), 1),  # the driver does not tell
    ],
)
def test_a_user_does_not_watch_what_is_not_only_theirs(on: tuple[tuple[int, ...], ...], gpu: int) -> None:
    async def body(watcher: CounterWatcher, connections: InProcess) -> None:
        with pytest.raises(NotPermitted) as told:
            await first(watcher, request(gpu), user())
        assert told.value.reason is Reason.NOT_YOUR_GPU
        assert not connections.service.held

    run(gpus_with(*on), body)


def test_an_administrator_watches_all() -> None:
    async def body(watcher: CounterWatcher, _: InProcess) -> None:
        means = await first(watcher, request(), user(Role.ADMIN))
        assert [gpu.gpu for gpu in means.gpus] == [0, 1]

    run(gpus_with(), body)


def test_a_watch_ends_when_somebody_elses_process_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_counters, "LOOK_S", 0.05)
    monkeypatch.setattr(watch_counters, "TAKE_S", 0.02)
    host = gpus_with((10,))

    async def body(watcher: CounterWatcher, connections: InProcess) -> None:
        stream = watcher.watch(request(0), user())
        await stream.__anext__()
        host.on = ((10, 20),)
        with pytest.raises(NotPermitted):
            async for _ in stream:
                pass
        await soon(lambda: not connections.service.held, "the GPU is free again")

    run(host, body)


def test_a_sampler_that_is_gone_ends_the_watch_with_the_reason() -> None:
    async def body(watcher: CounterWatcher, connections: InProcess) -> None:
        stream = watcher.watch(request(0), user(Role.ADMIN))
        await stream.__anext__()
        await connections.service.stop()
        last = [means async for means in stream][-1]
        assert last.gpus[0].reason_code == "" or "has ended" in last.gpus[0].reason

    run(gpus_with(), body)


@pytest.mark.parametrize(
    ("asked", "error", "reason"),
    [
        (request(interval_ns=1), InvalidRequest, Reason.INVALID_FIELD),
        (request(period_ns=1), InvalidRequest, Reason.INVALID_FIELD),
        (request(set="no"), InvalidRequest, Reason.INVALID_FIELD),
        (request(set="memory", metrics=["a"]), InvalidRequest, Reason.INVALID_FIELD),
        (request(metrics=["a" * 200]), InvalidRequest, Reason.INVALID_FIELD),
        (request(5), NotFound, Reason.COUNTERS_UNAVAILABLE),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    asked: pb.WatchCountersRequest, error: type[KinetodError], reason: Reason
) -> None:
    async def body(watcher: CounterWatcher, _: InProcess) -> None:
        with pytest.raises(error) as told:
            await first(watcher, asked, user(Role.ADMIN))
        assert told.value.reason is reason

    run(gpus_with(), body)


@pytest.mark.parametrize("code", list(CounterCode))
def test_every_refusal_of_the_sampler_has_its_reason(code: CounterCode) -> None:
    backend = MemoryBackend()
    backend.error = CounterError(code, "it says no")

    async def body(watcher: CounterWatcher, connections: InProcess) -> None:
        with pytest.raises((Precondition, InvalidRequest)) as told:
            await first(watcher, request(), user(Role.ADMIN))
        assert told.value.reason.value == code.value
        await soon(lambda: not connections.service.held, "nothing is held")

    run(gpus_with(), body, backend)


class OneLacks(MemoryBackend):
    """GPU 1 does not have what is asked for."""

    def start(self, uuid: str, *arguments: Any) -> Sampling:
        if uuid == "GPU-1":
            raise CounterError(CounterCode.INVALID_METRIC, "MEM has no such metric")
        return super().start(uuid, *arguments)


def test_who_names_no_gpu_watches_those_that_have_the_metrics_and_hears_of_the_others() -> None:
    async def body(watcher: CounterWatcher, _: InProcess) -> None:
        has, lacks = (await first(watcher, request(), user(Role.ADMIN))).gpus
        assert (has.gpu, list(has.means), has.reason_code) == (0, [7.0], "")
        assert (lacks.gpu, lacks.uuid, len(lacks.metrics)) == (1, "GPU-1", 0)
        assert (lacks.reason_code, lacks.reason) == ("COUNTERS_INVALID_METRIC", "MEM has no such metric")

    run(gpus_with(), body, OneLacks())


def test_a_named_gpu_without_the_metrics_is_an_error_and_frees_the_others() -> None:
    async def body(watcher: CounterWatcher, connections: InProcess) -> None:
        with pytest.raises(InvalidRequest, match="MEM has no such metric"):
            await first(watcher, request(0, 1), user(Role.ADMIN))
        await soon(lambda: not connections.service.held, "nothing is held")

    run(gpus_with(), body, OneLacks())


def test_the_list_has_gpus_sets_and_on_request_metrics() -> None:
    async def body(watcher: CounterWatcher, _: InProcess) -> None:
        found = await watcher.available(pb.ListCountersRequest())
        assert (found.backend, [gpu.gpu.uuid for gpu in found.gpus]) == ("memory", ["GPU-0", "GPU-1"])
        assert [each.name for each in found.gpus[0].sets] == ["overview", "memory", "tensor", "interconnect"]
        assert list(found.gpus[0].base_metrics) == []
        with_metrics = await watcher.available(pb.ListCountersRequest(base_metrics=True))
        assert with_metrics.gpus[0].base_metrics[0].startswith("metric_0000")

    run(gpus_with(), body)


def rows(*samples: tuple[int, int, tuple[float, float]]) -> np.ndarray:
    return np.array([*samples], dtype=row_type(2))


def test_a_long_sample_counts_for_more_than_a_short_one() -> None:
    found = SampleMeans(2)
    found.add(rows((100, 130, (10, 1)), (130, 140, (50, 2))))
    found.add(rows((140, 150, (50, 3))))
    assert found.means() == [26.0, 1.6]
    assert found.maxima() == [50.0, 3.0]
    assert (found.start_ns, found.end_ns, found.samples) == (100, 150, 3)


def test_a_sample_without_a_value_counts_for_the_other_metrics_only() -> None:
    found = SampleMeans(2)
    found.add(rows((0, 10, (math.nan, 1)), (10, 20, (math.inf, 3)), (20, 30, (5, 5))))
    assert found.means() == [5.0, 3.0] and found.maxima() == [5.0, 5.0]


def test_no_samples_have_no_mean() -> None:
    found = SampleMeans(2)
    found.add(rows()[:0])
    assert all(map(math.isnan, [*found.means(), *found.maxima()])) and found.samples == 0
