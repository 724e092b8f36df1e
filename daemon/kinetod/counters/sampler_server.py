"""kinetod-counters as a service: accepts the daemon's requests and samples each GPU in a thread.

Theory of operation
    One task per connection, one request at a time, one GPU per connection. The kernel identifies the caller
    (SO_PEERCRED). Closing the connection ends the sampling, so that a dead daemon does not keep a GPU.

    The event loop runs nothing that may hang in the driver. Late work is refused and its thread abandoned; if that
    returns after all, it releases what it holds. As long as a thread is abandoned, `hung` is true: the process finishes
    what it is serving, accepts nothing new, and should then end, since only that frees the thread.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from kinetod.base.safe_text import clean
from kinetod.base.unix_sockets import receive, send
from kinetod.counters import messages
from kinetod.counters.backend_group import who_measures
from kinetod.counters.interface import (
    DEFAULT_INTERVAL_NS,
    CounterBackend,
    CounterCode,
    CounterDevice,
    CounterError,
    CounterPlan,
    WantedCounters,
    check_interval,
)
from kinetod.counters.kernel_gpus import INTEL
from kinetod.counters.level_zero_library import stream_holder
from kinetod.counters.sample_rings import RingWriter
from kinetod.processes.drm_gpus import PROC, SYS, drm_gpus
from kinetod.processes.profiler_signs import BY_PRODUCT, COUNTERS_USER, Holds
from kinetod.profilers import ProfilingTool, scan
from kinetod.supervise.helper_service import Connections, HelperCaller, HungUp

EXIT_HUNG = 70
LOOK_S = 0.2
REQUEST_S = 30.0  # maximum silence of a connection that samples nothing
WORK_S = 20.0  # enabling takes 0.3 s for each GPU, one after the other; loading the driver a few seconds
STOP_S = 5.0
FREED_S = 1.0  # the daemon ends a cancelled watch shortly after its caller has gone
SEND_S = 5.0
HOLDER_S = 2.0

UNKNOWN = "another process"
_SAMPLES_GPUS = "Nsight Systems"  # with --gpu-metrics-devices, although it otherwise traces processes
log = logging.getLogger(__name__)

T = TypeVar("T")


# Runs one GPU's sampling, and other blocking work of kinetod-counters, in threads of their own. They are daemon
# threads: one that hangs in the driver keeps the process neither from serving others nor from ending.
async def in_own_thread(function: Callable[[], T]) -> T:
    """Awaits the function's result; a caller that gives up abandons the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # it is a T where there is no error

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as exc:  # noqa: BLE001  # whoever awaits gets it
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="counters work", daemon=True).start()
    return await done


class SamplingJob:
    """Starts a GPU's sampling and decodes it, all in one thread, which owns the ring and the counters."""

    def __init__(
        self, backend: CounterBackend, uuid: str, wanted: WantedCounters, interval_ns: int, most_ns: int
    ) -> None:
        self._backend = backend
        self._uuid = uuid
        self._wanted = wanted
        self._interval_ns = interval_ns
        self._most_ns = most_ns
        self._ring: RingWriter | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[CounterPlan] = self._loop.create_future()
        self.ended = asyncio.Event()

    async def start(self) -> CounterPlan:
        """Returns the plan that is sampled. Raises CounterError and what the backend raises; may be cancelled."""
        threading.Thread(target=self._work, name=f"counters {self._uuid[:12]}", daemon=True).start()
        return await self._started

    def descriptor(self) -> int:
        """The memfd of the ring, until `release`."""
        assert self._ring is not None
        return self._ring.descriptor

    def stop(self) -> None:
        """Ends the sampling, even one that has not begun yet; `ended` is set then. Does not block."""
        with self._lock:
            self._given_up = True
            if self._ring is not None:
                self._ring.stop()

    def release(self) -> None:
        """Releases the ring of a job that has ended."""
        with self._lock:
            ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _make_ring(self, metrics: int) -> RingWriter:
        ring = RingWriter(metrics, most_ns=self._most_ns)
        with self._lock:
            if self._ring is not None:  # from a failed attempt
                self._ring.close()
            self._ring = ring
            if self._given_up:
                ring.stop()
        return ring

    def _work(self) -> None:
        try:
            sampling = self._backend.start(self._uuid, self._wanted, self._interval_ns, self._make_ring)
            try:
                self._tell(lambda: self._settle(sampling.plan))
                sampling.run()
            finally:
                sampling.close()
        except Exception as exc:  # noqa: BLE001  # whoever awaits gets it
            error = exc
            if not self._tell(lambda: self._settle(error)):
                log.warning("sampling %s failed while the service was stopping: %s", self._uuid, exc)
        finally:
            self._tell(self.ended.set)

    def _settle(self, outcome: CounterPlan | Exception) -> None:
        """Reports the outcome of the start, unless the caller has given up."""
        if self._started.done():
            return
        if isinstance(outcome, Exception):
            self._started.set_exception(outcome)
        else:
            self._started.set_result(outcome)

    def _tell(self, action: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed: the process ends
            return False
        return True


# Finds who has the counters of a GPU: best effort, by traces of other profilers in /proc. Blocking.
def holder(pci_bus_id: str, proc: Path = PROC, sys: Path = SYS) -> str:
    """A name such as "Nsight Compute (process 1234)", or UNKNOWN, as for AMD's GPUs.

    pci_bus_id: in CUDA's form, 0000:01:00.0.
    """
    for gpu in drm_gpus(sys, proc):
        if gpu.pci_bus_id == pci_bus_id.lower():
            return (stream_holder(proc) if gpu.vendor == INTEL else "") or UNKNOWN
    minor = device_minor(pci_bus_id, proc)
    found = scan(proc, own=frozenset({os.getpid()})).profilers
    suspects = [tool for tool in found if _holds(tool) and (not tool.gpus or minor is None or minor in tool.gpus)]
    if not suspects:
        return UNKNOWN
    tool = max(suspects, key=_likelihood)
    return f"{tool.product} (process {tool.pid})" if tool.pid else tool.product


def _likelihood(tool: ProfilingTool) -> tuple[bool, bool, bool]:
    """Sort key. A library loaded into a measured program is weaker evidence than the tool's own process."""
    sign = BY_PRODUCT[tool.product]
    return sign.holds is not Holds.PROCESS, sign is not COUNTERS_USER, bool(tool.gpus)


def device_minor(pci_bus_id: str, proc: Path = PROC) -> int | None:
    """N of /dev/nvidiaN, according to the driver; None if unknown."""
    folder = proc / "driver/nvidia/gpus" / pci_bus_id.lower()
    try:
        lines = (folder / "information").read_text(errors="replace").splitlines()
        return next((int(line.partition(":")[2]) for line in lines if line.startswith("Device Minor")), None)
    except (OSError, ValueError):
        return None


def _holds(tool: ProfilingTool) -> bool:
    sign = BY_PRODUCT.get(tool.product)
    return sign is not None and (sign.holds in (Holds.COUNTERS, Holds.BOTH) or sign.product == _SAMPLES_GPUS)


class SamplerService:
    """Serves connections. may_ask: whether a user is served. holder_of: finds who has a GPU's counters; may block."""

    def __init__(
        self,
        backend: CounterBackend,
        *,
        may_ask: Callable[[int], bool],
        holder_of: Callable[[str], str] = holder,
        work_s: float = WORK_S,
    ) -> None:
        self.backend = backend
        self._may_ask = may_ask
        self._holder_of = holder_of
        self.work_s = work_s
        self.connections = Connections(self._serve)
        self._looking: asyncio.Task[None] | None = None
        self._late: set[asyncio.Task[Any]] = set()
        self.held: dict[str, asyncio.Task[None]] = {}  # done when the GPU is free again
        self._sampled = False

    @property
    def used_up(self) -> bool:
        """Whether the process must end, because its backend samples once."""
        return self._sampled and self.backend.serves_once and not self.held

    @property
    def hung(self) -> bool:
        """Whether a thread is stuck in the driver."""
        return bool(self._late)

    async def start(self) -> None:
        """Starts checking whether the process must end."""
        self._looking = asyncio.create_task(self._look(), name="counters end")

    async def _look(self) -> None:
        """Ends the process, once it serves nobody, if a thread hangs or it is used up."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.connections.idle_s() <= 0:
                continue
            if self.hung:
                log.error("exiting, because a thread is stuck in the driver")
                logging.shutdown()
                os._exit(EXIT_HUNG)
            if self.used_up:
                signal.raise_signal(signal.SIGTERM)

    async def stop(self) -> None:
        """Closes all connections, which ends their sampling."""
        if self._looking is not None:
            self._looking.cancel()
        await self.connections.stop()

    async def _serve(self, sock: socket.socket, caller: HelperCaller) -> None:
        await _Connection(self, sock, caller).serve()

    def check_caller(self, caller: HelperCaller) -> None:
        """Raises CounterError for a user who is not served."""
        if not self._may_ask(caller.uid):
            log.warning("%s was refused: --caller names the users who are allowed", caller)
            reason = f"uid {caller.uid} is not allowed to use kinetod-counters; its --caller names the users who are"
            raise CounterError(CounterCode.NOT_PERMITTED, reason)

    async def work(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Awaits work that may hang. Raises CounterError if it does, and the work's own errors."""
        if self.hung:
            coroutine.close()
            raise CounterError(CounterCode.FAILED, "the driver is not responding; kinetod-counters will restart soon")
        task = asyncio.create_task(coroutine)
        done, _ = await asyncio.wait((task,), timeout=self.work_s)
        if not done:
            log.error("the driver has not answered for %g s", self.work_s)
            self.note_late(task)
            raise CounterError(CounterCode.FAILED, f"the driver did not answer within {self.work_s:g} s")
        return task.result()

    def hold(self, uuid: str, job: SamplingJob) -> asyncio.Task[None]:
        """Records who samples a GPU until the job has ended; then the task is done."""

        async def freed() -> None:
            await job.ended.wait()
            del self.held[uuid]

        self._sampled = True
        self.held[uuid] = asyncio.create_task(freed(), name="counters held")
        return self.held[uuid]

    async def is_free(self, uuid: str) -> bool:
        """Whether nobody here samples this GPU; waits a moment for a sampling that is about to end."""
        if (freed := self.held.get(uuid)) is not None:
            await asyncio.wait((freed,), timeout=FREED_S)
        return uuid not in self.held

    def note_late(self, task: asyncio.Task[Any]) -> None:
        """Tracks work that hangs until it returns."""
        self._late.add(task)
        task.add_done_callback(self._returned)

    def _returned(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("late error from the driver: %s", error)

    async def with_holder(self, error: CounterError, uuid: str, pci_bus_id: str) -> CounterError:
        """Adds the holder of the counters to an error, if it can be found."""
        name = UNKNOWN
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(HOLDER_S):
                name = await in_own_thread(lambda: self._holder_of(pci_bus_id))
        reason = (
            f"GPU {uuid}: {name} is using its counters, which only one process can use at a time; stop that process, "
            "or try again later"
        )
        return CounterError(error.code, reason)


class _Connection:
    """One caller."""

    def __init__(self, service: SamplerService, sock: socket.socket, caller: HelperCaller) -> None:
        self._service = service
        self._sock = sock
        self._caller = caller
        self._job: SamplingJob | None = None
        self._freed: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Serves until the caller closes the connection, is silent for too long, or breaks the protocol."""
        try:
            while True:
                async with asyncio.timeout(None if self._job is not None else REQUEST_S):
                    packet = await self._receive()
                try:
                    # Not earlier: closing a socket with an unread packet would lose the refusal.
                    self._service.check_caller(self._caller)
                    await self._carry_out(messages.request(packet))
                except CounterError as exc:
                    log.info("refused %s: %s", exc.code, exc.reason)
                    await self._refuse(exc.code, exc.reason)
        except messages.BadCounterMessage as exc:
            log.warning("a caller was refused: %s", clean(str(exc), 500))
            await self._refuse("REQUEST", str(exc))
        finally:
            await self._end()

    async def _receive(self) -> bytes:
        packet, fds = await receive(self._sock, messages.MAX_REQUEST_BYTES + 1)
        for fd in fds:
            socket.close(fd)
        if not packet:
            raise HungUp
        return packet

    async def _refuse(self, code: str, reason: str) -> None:
        await self._send(messages.CountersRefused(code=code, reason=clean(reason, 2000)))

    async def _send(self, said: messages.CounterAnswer, *descriptors: int) -> None:
        """Sends an answer. Raises OSError, TimeoutError."""
        await send(self._sock, messages.encode(said), list(descriptors), SEND_S)

    async def _carry_out(self, asked: messages.CounterRequest) -> None:
        service, backend = self._service, self._service.backend
        said: messages.CounterAnswer
        if isinstance(asked, messages.StartSampling):
            await self._start(asked)
            return
        if isinstance(asked, messages.StopSampling):
            await self._end()
            said = messages.SamplingStopped()
        elif isinstance(asked, messages.ListGpus):
            gpus = await service.work(in_own_thread(_opened(backend)))
            said = messages.GpusReply(gpus=tuple(gpus), backend=backend.name, library_version=backend.library_version)
        elif isinstance(asked, messages.ListBaseMetrics):
            uuid = asked.gpu
            names = await service.work(in_own_thread(lambda: backend.base_metrics(uuid)))
            said = messages.BaseMetricsReply(names=tuple(_fitting(names)))
        else:
            plan_of = asked
            plan = await service.work(in_own_thread(lambda: backend.plan(plan_of.gpu, _wanted(plan_of))))
            said = messages.PlanReply(plan=plan)
        await self._send(said)

    async def _start(self, asked: messages.StartSampling) -> None:
        """Starts the sampling. Raises CounterError, BadCounterMessage."""
        service, backend = self._service, self._service.backend
        if self._job is not None:
            raise messages.BadCounterMessage("a request for a second GPU on one connection")
        gpus = await service.work(in_own_thread(_opened(backend)))
        gpu = next((each for each in gpus if each.uuid == asked.gpu), None)
        if gpu is None:
            raise CounterError(CounterCode.UNAVAILABLE, f"no driver lists a GPU {asked.gpu}")
        if not await service.is_free(asked.gpu):
            reason = f"GPU {asked.gpu}: kinetod is sampling its counters for another request; try again later"
            raise CounterError(CounterCode.BUSY, reason)
        interval_ns = asked.interval_ns or max(DEFAULT_INTERVAL_NS, gpu.least_interval_ns)
        check_interval(interval_ns)
        job = SamplingJob(backend, asked.gpu, _wanted(asked), interval_ns, asked.most_ns)
        self._job, self._freed = job, service.hold(asked.gpu, job)
        try:
            plan = await service.work(job.start())
        except CounterError as exc:
            await self._end()
            if exc.code is not CounterCode.BUSY:
                raise
            raise await service.with_holder(exc, asked.gpu, gpu.pci_bus_id) from exc
        by = who_measures(backend, asked.gpu)
        started = messages.SamplingStarted(
            gpu=gpu, plan=plan, interval_ns=interval_ns, backend=by.name, library_version=by.library_version
        )
        log.info("sampling %d metrics of %s every %g ms", len(plan.metrics), asked.gpu, interval_ns / 1e6)
        await self._send(started, job.descriptor())

    async def _end(self) -> None:
        """Ends the sampling. If it does not end, it counts as hung until it has."""
        job, self._job = self._job, None
        if job is None or self._freed is None:
            return
        job.stop()
        done, _ = await asyncio.wait((self._freed,), timeout=STOP_S)
        if done:
            job.release()
        else:
            log.error("the driver did not stop sampling in time")
            self._service.note_late(self._freed)


def _opened(backend: CounterBackend) -> Callable[[], list[CounterDevice]]:
    def look() -> list[CounterDevice]:
        backend.open()
        return backend.devices()

    return look


def _wanted(asked: messages.PlanSampling | messages.StartSampling) -> WantedCounters:
    return WantedCounters(set_name=asked.set_name, metrics=asked.metrics)


def _fitting(names: list[str]) -> list[str]:
    room = messages.MAX_ANSWER_BYTES - 1024
    fitting = []
    for name in names[:4096]:
        room -= len(name.encode()) + 3
        if room < 0:
            break
        fitting.append(name)
    return fitting
