"""The daemons of many simulated hosts in one process, each with its own sockets, store and captures.

    python -m campaign.parts.fleet_hosts    with a `Plan` as one line of JSON on standard input

Theory of operation
    Each host is made of the parts that kinetod is made of (`kinetod.app`), without live attach. Decode workers,
    threads for files and the reader of GPUs are shared. A broken host is broken in its own service only: calls to the
    others work as usual. "ready" is printed once all are served. The end of standard input ends everything.
"""

import asyncio
import contextlib
import itertools
import json
import resource
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents.agent_hub import AgentHub
from kinetod.agents.link import LinkServer
from kinetod.app import start_keeping
from kinetod.base import logs
from kinetod.base.fair_slots import FairSlots
from kinetod.captures.counters.capture_counters import CounterSource
from kinetod.captures.counters.counter_request import GpuAccess
from kinetod.captures.manager import CaptureManager, no_such_capture
from kinetod.captures.result.decode_pool import WorkerPool
from kinetod.captures.target.services import Conflicts, Services
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config, Settings
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.rpc.diagnose_host import Diagnoser, HostDiagnoser
from kinetod.rpc.grpc_server import RpcServer
from kinetod.rpc.profiler_service import HostInfo, ProfilerService
from kinetod.rpc.read_stacks import StackLooker
from kinetod.rpc.watch_counters import CounterWatcher
from kinetod.rpc.watch_host import HostWatcher
from kinetod.selection.process_registry import Registry
from kinetod.store.capture_store import Store
from kinetod.wiring.access_wiring import make_access
from kinetod.wiring.metrics_wiring import make_counters

RPC_SOCKET, AGENT_SOCKET, STATE_DIR = "rpc", "agents", "state"  # in a host's folder
FILE_THREADS = 4
STOP_S = 2.0
DAY_NS = 86_400_000_000_000
FINE, SLOW, LATE, UNSTEADY, FAR = "fine", "slow", "late", "unsteady", "far"  # what a host may be


@dataclass(frozen=True, slots=True)
class Plan:
    """folders: one for each host, named like the host; kinds: how each host behaves."""

    folders: list[str]
    kinds: list[str]
    slow_s: float  # by which a slow or late host is behind
    workers: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class SlowService(ProfilerService):
    """Makes captures with a delay."""

    delay_s = 0.0

    async def CreateCapture(self, request: Any, context: Any) -> Any:
        """Creates the capture after a delay."""
        await asyncio.sleep(self.delay_s)
        return await super().CreateCapture(request, context)


class LateService(ProfilerService):
    """Starts captures with a delay."""

    delay_s = 0.0

    async def StartCapture(self, request: Any, context: Any) -> Any:
        """Starts the capture after a delay."""
        await asyncio.sleep(self.delay_s)
        return await super().StartCapture(request, context)


class UnsteadyService(ProfilerService):
    """Has a clock that jumps by a second between any two answers; the host's own is right."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._jumps = itertools.cycle((1, -1))

    async def GetClock(self, request: Any, context: Any) -> Any:
        """Returns a time other than that by which captures start."""
        return _moved(await super().GetClock(request, context), next(self._jumps) * 10**9)


class FarService(ProfilerService):
    """Has a clock that is a day ahead of the host's own."""

    async def GetClock(self, request: Any, context: Any) -> Any:
        """Returns a time other than that by which captures start."""
        return _moved(await super().GetClock(request, context), DAY_NS)


SERVICES: dict[str, type[ProfilerService]] = {
    FINE: ProfilerService,
    SLOW: SlowService,
    LATE: LateService,
    UNSTEADY: UnsteadyService,
    FAR: FarService,
}


def _moved(clock: pb.Clock, by_ns: int) -> pb.Clock:
    return pb.Clock(received_ns=clock.received_ns + by_ns, sent_ns=clock.sent_ns + by_ns)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the hosts of this process share."""

    workers: WorkerPool
    files: FairSlots
    gpus: GpuReader


def config_of(folder: Path) -> Config:
    """Configuration of a host's daemon."""
    return Config(
        listen=(ListenAddress(path=folder / RPC_SOCKET),),
        agent_socket=folder / AGENT_SOCKET,
        state_dir=folder / STATE_DIR,
        min_free_bytes=1 << 20,
        start_free_bytes=0,
        attach=False,
    )


async def start_host(
    folder: Path, kind: str, shared: Shared, stack: contextlib.AsyncExitStack
) -> Callable[[], Awaitable[None]]:
    """Serves the host; returns the function that ends it."""
    settings = Settings(config_of(folder))
    config = settings.current
    store = await asyncio.to_thread(Store, config.state_dir)
    stack.callback(store.close)
    access = await make_access(settings, stack)
    services = Services(
        settings=settings,
        workers=shared.workers,
        files=shared.files,
        free_bytes=store.free_bytes,
        host=folder.name,
        conflicts=Conflicts(config.state_dir),
    )
    hub = AgentHub()
    registry = Registry(hub, attaching=False)
    link = LinkServer(config.agent_socket, hub, mode=0o600)
    keeping = await start_keeping(settings, store, stack)
    captures = CaptureManager(settings, registry, store, services, keeping)
    gate = access.gate(captures.resource, no_such_capture)
    captures.on_end = gate.note_end
    looks = FairSlots(2)
    service = SERVICES[kind](
        hub=hub,
        registry=registry,
        captures=captures,
        host=HostInfo(settings, store, folder.name, shared.gpus),
        watcher=HostWatcher(
            hub=hub,
            registry=registry,
            gpus=shared.gpus,
            captures_running=lambda: captures.running,
            state_dir=config.state_dir,
            hostname=folder.name,
            settings=settings,
            looks=looks,
        ),
        diagnoser=Diagnoser(registry, attaching=False),
        host_diagnoser=HostDiagnoser(settings, registry, shared.gpus, folder.name),
        stacks=StackLooker(registry, shared.gpus),
        counters=CounterWatcher(
            CounterSource(make_counters(config, stack), GpuAccess(registry, shared.gpus)), settings
        ),
        gate=gate,
        settings=settings,
        looks=looks,
    )
    rpc = RpcServer(service, access.front, access.folder, access.certificates, access.call_tracker)
    await rpc.start()
    link.start()
    await rpc.set_serving(True)

    async def end() -> None:
        link.stop_accepting()
        await captures.stop(STOP_S)
        await rpc.stop(STOP_S)
        link.close()

    return end


async def serve(plan: Plan) -> None:
    """Runs all hosts until standard input ends."""
    SlowService.delay_s = LateService.delay_s = plan.slow_s
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        workers = WorkerPool(plan.workers)
        await workers.start()
        stack.push_async_callback(workers.stop)
        executor = ThreadPoolExecutor(FILE_THREADS, "files")
        files = FairSlots(FILE_THREADS, threads=executor)
        stack.callback(executor.shutdown)
        gpus = GpuReader()
        stack.push_async_callback(asyncio.to_thread, gpus.close)
        shared = Shared(workers, files, gpus)
        ends = [
            await start_host(Path(folder), kind, shared, stack)
            for folder, kind in zip(plan.folders, plan.kinds, strict=True)
        ]
        print("ready", flush=True)
        loop.add_reader(sys.stdin.fileno(), over.set)
        await over.wait()
        loop.remove_reader(sys.stdin.fileno())
        await asyncio.gather(*(end() for end in ends))


def main() -> int:
    """Reads the plan and serves."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logs.configure("warning")
    asyncio.run(serve(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
