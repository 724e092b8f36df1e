"""DiagnoseHost: what the daemon knows about its host, combined with the findings of a separate process."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.attach.finding import Finding, Status
from kinetod.config.settings import Settings
from kinetod.gpus.gpu_findings import findings as gpu_findings
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.check_runner import HostLooker, Searcher
from kinetod.kineto_ipc.door_findings import DoorState
from kinetod.kineto_ipc.door_findings import of_host as polling_findings
from kinetod.permissions.role_policy import Caller
from kinetod.plugins.plugin_findings import findings as plugin_findings
from kinetod.plugins.plugin_loader import KnownPlugins
from kinetod.profilers.profiler_findings import findings as profiler_findings
from kinetod.profilers.profiler_scan import ProfilingTool
from kinetod.rpc.diagnose_process import to_check
from kinetod.selection.process_registry import Registry
from kinetod.telemetry.gpu_metrics import present


class HelperSearcher(Searcher, Protocol):
    """The attach helper service."""

    async def problem(self) -> str:
        """Why the helper cannot be asked; "" if it answers."""


async def _nothing(_caller: Caller) -> list[Finding]:
    return []


class HostDiagnoser:
    """Diagnoses the host for callers. helper: None if this daemon attaches by itself; doors, metrics: more findings."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        gpus: GpuReader,
        hostname: str,
        *,
        helper: HelperSearcher | None = None,
        looker: HostLooker | None = None,
        gpus_present: Callable[[], Mapping[str, int]] = present,
        plugins: KnownPlugins | None = None,
        polls: Callable[[], DoorState | None] = lambda: None,
        doors: Callable[[Caller], Awaitable[list[Finding]]] = _nothing,
        metrics: Callable[[], list[Finding]] = list,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._gpus = gpus
        self._hostname = hostname
        self._helper = helper
        self._looker = looker or HostLooker(helper=helper)
        self._gpus_present = gpus_present
        self._plugins = plugins or KnownPlugins()
        self._polls = polls
        self._doors = doors
        self._metrics = metrics

    async def diagnose(self, caller: Caller) -> pb.HostDiagnosis:
        """All checks, run afresh. Processes of other profilers are named only to callers who may see them."""
        config = self._settings.current
        question = CheckQuestion(
            daemon_pid=os.getpid(),
            store=str(config.state_dir),
            needed_bytes=config.needed_bytes,
            helper=self._helper is not None,
            attaching=config.attach,
        )
        looked, gpus, helper, doors = await asyncio.gather(
            self._looker.look(question), asyncio.to_thread(self._look_at_gpus), self._ask_helper(), self._doors(caller)
        )
        findings = [*looked.findings, *helper, *doors, *self._metrics(), *gpus, *plugin_findings(self._plugins)]
        findings += polling_findings(self._polls())
        if looked.scan is not None:
            visible = await self._visible(looked.scan.profilers, caller)
            findings += profiler_findings(looked.scan, lambda each: each.pid in visible, looked.dcgm)
        return pb.HostDiagnosis(hostname=self._hostname, checks=map(to_check, findings))

    def _look_at_gpus(self) -> tuple[Finding, ...]:
        return gpu_findings(self._gpus.read(), self._gpus_present())

    async def _ask_helper(self) -> list[Finding]:
        if self._helper is None:
            return []
        name, problem = "attach_helper", await self._helper.problem()
        if problem:
            return [Finding(name, Status.PROBLEM, problem)]
        return [Finding(name, Status.OK, "answers")]

    async def _visible(self, profilers: Iterable[ProfilingTool], caller: Caller) -> set[int]:
        pids = {each.pid for each in profilers if each.pid}
        candidates = [await self._registry.candidate(pid) for pid in sorted(pids)]
        return {each.key.pid for each in candidates if each is not None and each.visible_to(caller)}
