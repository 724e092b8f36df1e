"""Starts the metrics endpoint, and the metrics under Dynolog's names."""

import asyncio
import contextlib
from collections.abc import Callable

from prometheus_client.registry import Collector

from kinetod.agents.agent_hub import AgentHub
from kinetod.attach.finding import Finding, Status
from kinetod.config.metrics_settings import COMPAT_DYNOLOG
from kinetod.config.settings import SECOND_NS, Config
from kinetod.gpus.container_owners import ContainerOwners
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.job_owners import JobFolder
from kinetod.gpus.slurm_variables import SlurmVariables
from kinetod.kubernetes.pod_names import KubeletGpuHolders
from kinetod.telemetry.daemon_metrics import DaemonCollector, DaemonState
from kinetod.telemetry.dynolog.json_log import JsonLog
from kinetod.telemetry.dynolog.page_metrics import DynologCollector
from kinetod.telemetry.dynolog.samplers import Every, GpuSampler, HostSampler
from kinetod.telemetry.gpu_metrics import GpuCollector
from kinetod.telemetry.host_metrics import HostCollector
from kinetod.telemetry.metrics_server import MetricsServer

KUBELET_DEADLINE_S = 1.0  # somebody scrapes; later answers are for the next one


def open_json_log(config: Config) -> JsonLog | None:
    """Where lines of metrics go; None if metrics.json_log is not set. Raises StartError."""
    return JsonLog(config.json_log) if config.json_log else None


def json_log_findings(json_log: JsonLog | None) -> list[Finding]:
    """What `kinetoctl doctor` says of the lines of metrics: why some are lost."""
    if json_log is None or not json_log.problem:
        return []
    advice = "name a file in metrics.json_log that lies in a folder of the daemon's user, and restart kinetod"
    return [Finding("metrics", Status.PROBLEM, f"lines of metrics are lost: {json_log.problem}", advice)]


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
    """Starts what measures at intervals; None if nothing asks for that."""
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
