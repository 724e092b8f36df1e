"""The daemon as a whole: starts its parts in order, monitors them, and stops them in reverse order.

Theory of operation
    Locks come first (state folder, agent socket), then the store, the decode workers, the gRPC server (not serving yet,
    so that nobody connects twice), the link and recovery. Once agents can connect, the store has been written to and
    the vendors' libraries have been asked, the daemon is READY=1 and SERVING. From then on one task checks the health
    of the parts, feeds the service manager's watchdog accordingly, and drops dead agents. SIGHUP rereads the
    configuration (`reload`). On SIGTERM or SIGINT the daemon accepts no new agents or captures, ends running captures
    with what can be decoded quickly, and stops the server. The next daemon decodes the rest.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.agents.agent_hub import AgentHub
from kinetod.agents.attacher import Attacher
from kinetod.agents.link import LinkServer
from kinetod.agents.proxy_pool import Proxies
from kinetod.attach.attach_types import Helpers
from kinetod.attach_helper.attach_pool import AttachHelpers
from kinetod.attach_helper.helper_client import HelperService
from kinetod.base import logs, notify
from kinetod.base.errors import StartError
from kinetod.base.fair_slots import FairSlots
from kinetod.base.instance_lock import Lock
from kinetod.base.unix_sockets import BriefTurns
from kinetod.captures.counters.capture_counters import CounterSource
from kinetod.captures.counters.counter_request import GpuAccess
from kinetod.captures.manager import CaptureManager, no_such_capture
from kinetod.captures.result.decode_pool import Bounds, WorkerPool
from kinetod.captures.result.lifecycle import Keeping
from kinetod.captures.target.services import DEADLINE_S as CONFLICTS_S
from kinetod.captures.target.services import Conflicts, DeviceGraphs, Services
from kinetod.config.config_sources import LoadedConfig, Origin, Reloader
from kinetod.config.settings import Config, Settings, serves_everybody, socket_mode
from kinetod.gpus.gpu_reader import ContextHolders, GpuReader
from kinetod.hooks.hook_runner import HookRunner
from kinetod.host_checks.check_runner import HostLooker
from kinetod.plugins.plugin_loader import load as load_plugins
from kinetod.rpc.diagnose_host import Diagnoser, HostDiagnoser
from kinetod.rpc.grpc_server import RpcServer
from kinetod.rpc.profiler_service import HostInfo, ProfilerService, read_gpus
from kinetod.rpc.read_stacks import StackLooker
from kinetod.rpc.watch_counters import CounterWatcher
from kinetod.rpc.watch_host import HostWatcher
from kinetod.sandbox.confinement import support
from kinetod.selection.process_registry import Registry
from kinetod.store.capture_store import LOCK_FILE, Store
from kinetod.store.path_guard import check_store
from kinetod.store.retention import Retention
from kinetod.telemetry.health import PROBE_PERIOD_S, Health, HealthReport
from kinetod.uploads.upload_queue import Uploader
from kinetod.uploads.worker_client import RemoteReader, UploadWorker, worker_environ, worker_options
from kinetod.wiring.access_wiring import make_access, make_dynolog_door, make_kubernetes, make_recorder, start_poll_door
from kinetod.wiring.metrics_wiring import json_log_findings, make_counters, open_json_log, start_metrics

log = logging.getLogger(__name__)

HOUSEKEEPING_PERIOD_S = 2.0
VENDOR_LIBRARIES_S = 10.0  # without the persistence daemon, the driver takes seconds to come up
STOP_CAPTURES_S = 8.0
STOP_CALLS_S = 1.0
FILE_THREADS = 4
LOOKS = 2  # calls that inspect processes and folders at a time; there are at least twice as many threads for it
SWITCH_INTERVAL_S = 0.0001  # each system call of the loop may wait this long for threads that read many small files
WORKER_LOCK = "upload.lock"  # in the state folder


def run(loaded: LoadedConfig, origin: Origin) -> int:
    """Runs until a signal; SIGHUP reloads `origin`. Raises StartError."""
    config = loaded.config
    for warning in loaded.warnings:
        log.warning("%s", warning)
    _raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with contextlib.ExitStack() as stack:
        _make_folders(config)
        lock_path = config.agent_socket.with_name(config.agent_socket.name + ".lock")
        stack.enter_context(Lock(config.state_dir / LOCK_FILE, f"the state folder {config.state_dir}"))
        stack.enter_context(Lock(lock_path, f"the agent socket {config.agent_socket}"))
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(BriefTurns())) as runner:
            runner.run(_serve(Settings(config), origin))
    return 0


def _make_folders(config: Config) -> None:
    sockets = [config.agent_socket, *(address.path for address in config.listen if address.path is not None)]
    # the system's folder is accessible to all: agents and clients of every user connect in it
    mode = 0o755 if serves_everybody(config) else 0o700
    for folder in {path.parent for path in sockets}:
        _make_runtime_dir(folder, mode)
    try:
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise StartError(
            f"cannot create the state folder {config.state_dir}: {exc.strerror}; use another --state-dir"
        ) from exc
    check_store(config.state_dir)


def _make_runtime_dir(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as exc:
        raise StartError(f"cannot create the folder {folder} for the sockets: {exc.strerror}") from exc
    if status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX:
        raise StartError(f"any user can replace the sockets in {folder}; make it writable only by its owner")
    if status.st_uid not in (0, os.geteuid()):
        raise StartError(
            f"{folder} belongs to uid {status.st_uid}, who could replace the sockets in it; remove it or "
            "choose other paths with --listen and --agent-socket"
        )


def _raise_file_limit() -> None:
    """Raises the descriptor limit: an agent takes two, so the usual 1024 would be enough for only 500 agents."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(settings: Settings, origin: Origin) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        daemon = await _start(settings, stack)
        reloader = Reloader(settings, origin, daemon.status)
        begun_in_terminal = logs.in_terminal()

        def hang_up() -> None:
            gone = begun_in_terminal and not logs.in_terminal()
            stop.set() if gone else reloader.ask()  # the terminal was closed, or somebody requests a reload

        loop.add_signal_handler(signal.SIGHUP, hang_up)
        await daemon.become_ready()
        listening = f"kinetod {__version__} is listening on {', '.join(map(str, settings.current.listen))}"
        if begun_in_terminal:  # whatever the log's level
            click.echo(listening, err=True)
        else:
            log.info("%s", listening)
        tasks = [asyncio.create_task(daemon.housekeeping_loop()), asyncio.create_task(reloader.run())]
        await stop.wait()
        for task in tasks:
            task.cancel()
        notify.stopping()
        log.info("stopping")
        await daemon.stop()


class _Daemon:
    """The running daemon and its parts."""

    def __init__(
        self, hub: AgentHub, link: LinkServer, captures: CaptureManager, rpc: RpcServer, health: Health
    ) -> None:
        self._hub = hub
        self._link = link
        self._captures = captures
        self._rpc = rpc
        self._health = health
        self._report = HealthReport()
        self._said = ""

    def status(self) -> str:
        """One line for the service manager."""
        agents, captures = len(self._hub.agents()), self._captures.running
        said = (f"{agents} agent{_s(agents)}, {captures} capture{_s(captures)} running", str(self._report))
        return "; ".join(filter(None, said))

    async def become_ready(self) -> None:
        """Starts serving and reports it, if everything works. Raises StartError."""
        self._report = await self._health.look()
        if self._report.problems:
            raise StartError("; ".join(self._report.problems))
        await self._rpc.set_serving(True)
        self._said = self.status()
        gc.collect()
        gc.freeze()  # permanent objects are not traversed repeatedly
        notify.ready(self._said)

    async def housekeeping_loop(self) -> None:
        """Checks health, watchdog, STATUS= and dead agents, every HOUSEKEEPING_PERIOD_S or half the watchdog's time."""
        watchdog_s = notify.watchdog_s()
        period_s = min(HOUSEKEEPING_PERIOD_S, watchdog_s / 2 if watchdog_s else HOUSEKEEPING_PERIOD_S)
        while True:
            try:
                await self._housekeep()
            except Exception:  # without pings, the watchdog ends a daemon in which this persists
                log.exception("housekeeping failed")
            else:
                if watchdog_s and not self._report.problems:
                    notify.notify("WATCHDOG=1")
            await asyncio.sleep(period_s)

    async def _housekeep(self) -> None:
        self._hub.check_alive()
        self._report = await self._health.look()
        await self._rpc.set_serving(not self._report.problems)
        if (status := self.status()) != self._said:
            self._said = status
            notify.notify(f"STATUS={status}")

    async def stop(self) -> None:
        """Stops captures first, then calls, so that watchers see the ends."""
        await self._rpc.set_serving(False)
        self._link.stop_accepting()
        await self._captures.stop(STOP_CAPTURES_S)
        await self._rpc.stop(STOP_CALLS_S)
        self._link.close()


def _s(count: int) -> str:
    return "" if count == 1 else "s"


async def _ask_vendor_libraries(gpus: GpuReader) -> None:
    """Logs the GPUs, before anybody queries them."""
    found = await asyncio.to_thread(read_gpus, gpus, VENDOR_LIBRARIES_S)
    said = f"{len(found.gpus)} GPUs, driver {found.driver_version}" if found.gpus else f"no GPUs: {found.note}"
    log.info("%s", said)


def _check_sandbox(config: Config) -> None:
    """Logs missing parts of the decoders' sandbox. Raises StartError if it is required."""
    missing = support().missing
    if missing and config.decode_sandbox == "required":
        problem = "; ".join(missing)
        raise StartError(f'decoders cannot be fully confined, but captures.decode_sandbox is "required": {problem}')
    for each in missing:
        log.warning("decoders are not fully confined: %s", each)


def _bounds(config: Config) -> Bounds:
    return Bounds(memory_bytes=config.decode_memory_bytes, required=config.decode_sandbox == "required")


async def _start(settings: Settings, stack: contextlib.AsyncExitStack) -> _Daemon:
    config = settings.current
    settings.subscribe(lambda config: logs.set_level(config.log_level))
    store = Store(config.state_dir)
    stack.callback(store.close)
    _check_sandbox(config)

    def room() -> int:
        return store.free_bytes() - settings.current.needed_bytes

    workers = WorkerPool(config.decode_workers, bounds=lambda: _bounds(settings.current), room=room)
    await workers.start()
    stack.push_async_callback(workers.stop)
    file_threads = ThreadPoolExecutor(FILE_THREADS + 1, "files")
    stack.callback(file_threads.shutdown)
    hostname = socket.gethostname()
    helper = HelperService(config.helper_socket) if config.helper_socket is not None else None
    helpers = helper or AttachHelpers()
    stack.push_async_callback(helpers.stop)
    kubernetes = make_kubernetes(settings, helper, lambda user: store.run(store.number_of, user), stack)
    access = await make_access(settings, stack, kubernetes.users)
    plugins = await load_plugins(config.plugins)
    hub = AgentHub(plugins.parcel, access.tell_standing)
    gpus = GpuReader(activity=config.gpu_activity)
    stack.push_async_callback(asyncio.to_thread, gpus.close)
    poll_door = await start_poll_door(config, helper, stack)
    registry = Registry(
        hub,
        privileged=helper,
        gpus=ContextHolders(gpus),
        attaching=config.attach,
        names=kubernetes.names,
        polling=poll_door.processes if poll_door is not None else None,
        signs=plugins.signs,
    )
    counters = CounterSource(make_counters(config, stack), GpuAccess(registry, gpus), gpus)
    services = Services(
        settings=settings,
        counters=counters,
        workers=workers,
        files=FairSlots(FILE_THREADS, spare=1, threads=file_threads),
        free_bytes=store.free_bytes,
        host=hostname,
        conflicts=Conflicts(config.state_dir, looker=HostLooker(deadline_s=CONFLICTS_S, helper=helper), gpus=gpus.read),
        device_graphs=DeviceGraphs(helpers.device_graphs),
        whose=registry.whose,
        plugins=plugins,
    )
    link = LinkServer(config.agent_socket, hub, mode=socket_mode(config))
    attacher = await _start_attacher(settings, helpers, link, hub, workers, gpus, stack) if config.attach else None
    keeping = await start_keeping(settings, store, stack)
    recorder = make_recorder(poll_door, helper, stack)
    captures = CaptureManager(settings, registry, store, services, keeping, attacher, recorder)
    gate = access.gate(captures.resource, no_such_capture)
    hooks = HookRunner(settings, store.capture_dir)
    stack.push_async_callback(hooks.stop)

    def is_healthy() -> bool:
        return rpc.serving

    looks = FairSlots(LOOKS, spare=1)
    door = make_dynolog_door(
        settings,
        access,
        registry,
        store,
        captures,
        stack,
        looks=looks,
        healthy=is_healthy,
        polling=poll_door.processes if poll_door is not None else None,
    )

    def ended(capture: pb.Capture) -> None:
        gate.note_end(capture)
        door.capture_ended(capture)

    captures.on_end, captures.on_answer = ended, hooks.capture_ended
    json_log = open_json_log(config)
    host = HostInfo(settings, store, hostname, gpus, plugins)
    watcher = HostWatcher(
        hub=hub,
        registry=registry,
        gpus=gpus,
        captures_running=lambda: captures.running,
        state_dir=config.state_dir,
        hostname=hostname,
        settings=settings,
        looks=looks,
    )
    polls = poll_door.state if poll_door is not None else lambda: None
    diagnoser = Diagnoser(registry, attaching=config.attach, process=helper, plugins=plugins, polls=polls)
    service = ProfilerService(
        hub=hub,
        registry=registry,
        captures=captures,
        host=host,
        watcher=watcher,
        diagnoser=diagnoser,
        host_diagnoser=HostDiagnoser(
            settings,
            registry,
            gpus,
            hostname,
            helper=helper,
            plugins=plugins,
            polls=polls,
            doors=door.findings,
            metrics=lambda: json_log_findings(json_log),
            standing=hub.standing,
        ),
        stacks=StackLooker(registry, gpus, helper),
        counters=CounterWatcher(counters, settings),
        gate=gate,
        settings=settings,
        looks=looks,
    )
    rpc = RpcServer(service, access.front, access.folder, access.certificates, access.call_tracker)
    await captures.recover()
    await rpc.start()
    stack.push_async_callback(rpc.stop, 0.0)  # also if a later step fails: gRPC logs an error once the loop has gone
    link.start()
    await door.start(captures)
    start_metrics(
        config,
        json_log=json_log,
        hub=hub,
        captures_running=lambda: captures.running,
        gpus=gpus,
        holders=kubernetes.holders,
        hostname=hostname,
        healthy=is_healthy,
        stack=stack,
    )
    await _ask_vendor_libraries(gpus)
    watchdog_s = notify.watchdog_s()
    probe_period_s = min(PROBE_PERIOD_S, (watchdog_s or PROBE_PERIOD_S) / 2)
    health = Health(link, store, workers, front=access.front, probe_period_s=probe_period_s)
    return _Daemon(hub, link, captures, rpc, health)


async def _start_attacher(
    settings: Settings,
    helpers: Helpers,
    link: LinkServer,
    hub: AgentHub,
    workers: WorkerPool,
    gpus: GpuReader,
    stack: contextlib.AsyncExitStack,
) -> Attacher:
    await helpers.start()
    attacher = Attacher(
        helpers,
        link,
        hub,
        deadline_ns=settings.current.attach_deadline_ns,
        keep_ns=settings.current.keep_agent_ns,
        own_pids=lambda: helpers.pids() | workers.pids() | gpus.pids(),
        proxies=Proxies(helper_socket=settings.current.helper_socket),
    )
    stack.push_async_callback(attacher.stop)
    settings.subscribe(
        lambda config: attacher.configure(deadline_ns=config.attach_deadline_ns, keep_ns=config.keep_agent_ns)
    )
    return attacher


async def start_keeping(settings: Settings, store: Store, stack: contextlib.AsyncExitStack) -> Keeping:
    """Starts retention and uploads, which run until the stack is closed."""
    worker = UploadWorker(
        Path(store.state_dir, WORKER_LOCK),
        lambda: worker_options(settings.current),
        lambda: worker_environ(settings.current),
    )
    stack.push_async_callback(worker.stop)
    uploader = Uploader(settings, store, worker)
    retention = Retention(settings, store, is_pending_upload=uploader.is_pending)
    uploader.on_uploaded = retention.wake
    tasks = [
        asyncio.create_task(uploader.run(), name="uploads"),
        asyncio.create_task(retention.run(), name="retention"),
    ]

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    stack.push_async_callback(stop)
    return Keeping(store, retention, uploader, RemoteReader(worker))
