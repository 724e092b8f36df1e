"""Starts the metrics endpoint, the metrics under Dynolog's names, and the client for hardware counters."""

import asyncio
import contextlib
from collections.abc import Callable

from prometheus_client.registry import Collector

from kinetod.agents.agent_hub import AgentHub
from kinetod.attach.attach_types import Finding, Status
from kinetod.config.metrics_settings import COMPAT_DYNOLOG
from kinetod.config.settings import SECOND_NS, Config
from kinetod.counters.counter_client import CounterClient, CountersChild, CountersService
from kinetod.gpus.gpu_owners import ContainerOwners, JobFolder, SlurmVariables
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.kubernetes.pod_names import KubeletGpuHolders
from kinetod.telemetry.dynolog_page import DynologCollector
from kinetod.telemetry.dynolog_samplers import Every, GpuSampler, HostSampler, JsonLog
from kinetod.telemetry.gpu_metrics import GpuCollector
from kinetod.telemetry.host_sample import HostCollector
from kinetod.telemetry.metrics_server import DaemonCollector, DaemonState, MetricsServer

KUBELET_DEADLINE_S = 1.0  # a scrape is waiting; later answers are for the next one


def open_json_log(config: Config) -> JsonLog | None:
    """The destination of metric lines; None if metrics.json_log is not set. Raises StartError."""
    return JsonLog(config.json_log) if config.json_log else None


def json_log_findings(json_log: JsonLog | None) -> list[Finding]:
    """Findings of `kinetoctl doctor` about the metric lines: why some are lost."""
    if json_log is None or not json_log.problem:
        return []
    advice = "set metrics.json_log to a file in a folder of the daemon's user, and restart kinetod"
    return [Finding("metrics", Status.PROBLEM, f"metric lines are being lost: {json_log.problem}", advice)]


def start_metrics(
    config: Config,
    *,
    json_log: JsonLog | None,
    hub: AgentHub,
    captures_running: Callable[[], int],
    gpus: GpuReader,
    hostname: str,
    healthy: Callable[[], bool],
    stack: contextlib.AsyncExitStack,
    holders: KubeletGpuHolders | None = None,
) -> None:
    """Starts serving metrics if metrics.listen is set, and writing lines if there is a json_log. Raises StartError."""
    if config.metrics_listen is None and json_log is None:
        return
    loop = asyncio.get_running_loop()
    held = holders.reader(loop, KUBELET_DEADLINE_S) if holders is not None else dict
    owners, jobs = ContainerOwners(hostname, held=held), JobFolder(config.gpu_jobs_dir)
    sampler = _start_sampling(config, json_log, gpus, owners, jobs, stack)
    if config.metrics_listen is None:
        return
    collectors: list[Collector] = [
        DaemonCollector(
            loop,
            lambda: DaemonState(agents=hub.states(), captures_running=captures_running()),
        ),
        HostCollector(config.state_dir),
        GpuCollector(lambda deadline_s: gpus.read(deadline_s=deadline_s), hostname, owners=owners, jobs=jobs),
    ]
    if config.metrics_compat == COMPAT_DYNOLOG:
        assert sampler is not None
        collectors.append(DynologCollector(lambda: sampler.values, hostname))
    server = MetricsServer(config.metrics_listen, collectors, healthy=healthy)
    server.start()
    stack.push_async_callback(asyncio.to_thread, server.stop)


def _start_sampling(
    config: Config,
    json_log: JsonLog | None,
    gpus: GpuReader,
    owners: ContainerOwners,
    jobs: JobFolder,
    stack: contextlib.AsyncExitStack,
) -> HostSampler | None:
    """Starts periodic measurements; None if none are configured."""
    if config.metrics_compat != COMPAT_DYNOLOG and json_log is None:
        return None
    interval_s = config.host_interval_ns / SECOND_NS
    sampler = HostSampler(interval_s, prefixes=config.metrics_interfaces, json_log=json_log)
    loops = [Every("host-interval", interval_s, sampler.step)]
    if json_log is not None and config.gpu_interval_ns:
        of_gpus = GpuSampler(
            json_log,
            read=lambda deadline_s: gpus.read(deadline_s=deadline_s),
            owners=owners,
            jobs=jobs,
            slurm=SlurmVariables(),
        )
        loops.append(Every("gpu-interval", config.gpu_interval_ns / SECOND_NS, of_gpus.step))
    for each in loops:
        each.start()
        stack.push_async_callback(asyncio.to_thread, each.stop)
    return sampler


def make_counters(config: Config, stack: contextlib.AsyncExitStack) -> CounterClient:
    """Creates the client, which is stopped with the stack. It starts nothing until the first request."""
    if config.counters_socket is not None:
        client = CounterClient(CountersService(config.counters_socket))
    else:
        arguments = ["--backend", config.counters_backend, "--log-level", config.log_level]
        if config.counters_library is not None:
            arguments += ["--library", str(config.counters_library)]
        client = CounterClient(CountersChild(arguments))
    stack.push_async_callback(client.stop)
    return client
