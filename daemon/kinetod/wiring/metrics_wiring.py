"""Starts the metrics endpoint."""

import asyncio
import contextlib
from collections.abc import Callable

from kinetod.agents.agent_hub import AgentHub
from kinetod.config.settings import Config
from kinetod.gpus.container_owners import ContainerOwners
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.job_owners import JobFolder
from kinetod.kubernetes.pod_names import KubeletGpuHolders
from kinetod.telemetry.daemon_metrics import DaemonCollector, DaemonState
from kinetod.telemetry.gpu_metrics import GpuCollector
from kinetod.telemetry.host_metrics import HostCollector
from kinetod.telemetry.metrics_server import MetricsServer

KUBELET_DEADLINE_S = 1.0  # somebody scrapes; later answers are for the next one


def start_metrics(
    config: Config,
    *,
    hub: AgentHub,
    captures_running: Callable[[], int],
    gpus: GpuReader,
    hostname: str,
    healthy: Callable[[], bool],
    stack: contextlib.AsyncExitStack,
    holders: KubeletGpuHolders | None = None,
) -> None:
    """Starts serving metrics if metrics.listen is set. Raises StartError."""
    if config.metrics_listen is None:
        return
    loop = asyncio.get_running_loop()
    held = holders.reader(loop, KUBELET_DEADLINE_S) if holders is not None else dict
    server = MetricsServer(
        config.metrics_listen,
        [
            DaemonCollector(
                loop,
                lambda: DaemonState(agents=hub.states(), captures_running=captures_running()),
            ),
            HostCollector(config.state_dir),
            GpuCollector(
                lambda deadline_s: gpus.read(deadline_s=deadline_s),
                hostname,
                owners=ContainerOwners(hostname, held=held),
                jobs=JobFolder(config.gpu_jobs_dir),
            ),
        ],
        healthy=healthy,
    )
    server.start()
    stack.push_async_callback(asyncio.to_thread, server.stop)
