"""DiagnoseHost and DiagnoseProcess: combine the daemon's knowledge with the findings of separate processes."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Protocol

from kineto_protos.plain import standing_text
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.install_advice import install_advice
from kineto_trace.base.quantities import format_duration, lasted, times

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.attach.attach_types import Finding, Status
from kinetod.attach.inspect import process_inspection
from kinetod.attach_helper.diagnosis import Diagnosis, KnownAgent
from kinetod.attach_helper.diagnosis_runner import DiagnosisProcess
from kinetod.base.errors import invalid
from kinetod.base.safe_text import clean
from kinetod.captures.request.target_resolution import no_such_process, not_yours
from kinetod.config.settings import Settings
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import NAMES, GpuState, LibraryState, Snapshot, VendorLibrary
from kinetod.gpus.nvml import IN_MIG_MODE, NOT_ALLOWED, OFF, OLD_DRIVER
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.check_runner import HostLooker, Searcher
from kinetod.kineto_ipc.door_findings import DoorState
from kinetod.kineto_ipc.door_findings import of_host as polling_findings
from kinetod.kineto_ipc.door_findings import of_process as polling_of_process
from kinetod.permissions.role_policy import Action, Caller, Resource, may
from kinetod.plugins.plugin_loader import KnownPlugins, of_process
from kinetod.plugins.plugin_loader import findings as plugin_findings
from kinetod.processes.identity import ProcessKey
from kinetod.profilers import ProfilingTool
from kinetod.profilers import findings as profiler_findings
from kinetod.selection.candidate import Candidate
from kinetod.selection.process_registry import Registry
from kinetod.telemetry.gpu_metrics import present

_MAX_TEXT_CHARS = 2000
_STANDING_ADVICE = "it returns once the GPU is idle: end the kernel or collective that keeps running"
_AGENT_STATES = {
    pb.AGENT_STATE_READY: "READY",
    pb.AGENT_STATE_BUSY: "BUSY",
    pb.AGENT_STATE_INCOMPATIBLE: "INCOMPATIBLE",
}
VENDORS = {"nvml": ("nvidia",), "amdsmi": ("amd",), "sysman": ("intel",), "drm": ("amd", "intel")}
_BESIDE_THE_KERNEL = ("amdsmi", "sysman")  # the kernel's files describe the same GPUs
_PRODUCTS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}
# Advice, and the package from PyPI that is needed, too, if any.
_ADVICE: Mapping[tuple[str, LibraryState], tuple[str, ...]] = {
    ("nvml", LibraryState.ABSENT): ("install the driver's libnvidia-ml.so.1", "nvidia-ml-py"),
    ("amdsmi", LibraryState.ABSENT): ("install AMD SMI from ROCm 6 or later", "pyrsmi"),
    ("sysman", LibraryState.ABSENT): ("install Intel's Level Zero loader and driver (libze1, intel-level-zero-gpu)",),
}
_RESTARTS = {
    "nvml": "check whether `nvidia-smi` works; the driver may have to be reloaded",
    "amdsmi": "check whether `amd-smi` works; the driver may have to be reloaded",
    "sysman": "check whether `xpu-smi` works; the driver may have to be reloaded",
    "drm": "check whether /sys/class/drm can be read; the driver may have to be reloaded",
}
_ACTIVITY = "gpu_activity"
_ACTIVITY_ADVICE: Mapping[str, tuple[str, ...]] = {
    IN_MIG_MODE: ("use dcgm-exporter, which has these values for each GPU instance",),
    NOT_ALLOWED: ("run kinetod as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",),
    OLD_DRIVER: ("install a driver of branch 535 or later", "-U nvidia-ml-py"),
}


class HelperSearcher(Searcher, Protocol):
    """The attach helper service."""

    async def problem(self) -> str:
        """Why the helper is unavailable; "" if it answers."""


async def _nothing(_caller: Caller) -> list[Finding]:
    return []


class HostDiagnoser:
    """Diagnoses the host for callers. helper: None if this daemon attaches by itself; doors, metrics: more findings;
    standing: the agents in whose process a call of ours into a vendor's library is stuck.
    """

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
        standing: Callable[[], list[ConnectedAgent]] = list,
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
        self._standing = standing

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
        standing = await self._visible((agent.key for agent in self._standing()), caller)
        findings += standing_findings(standing.values())
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

    async def _visible(self, named: Iterable[ProfilingTool | ProcessKey], caller: Caller) -> dict[int, pb.Process]:
        pids = {each.pid for each in named if each.pid}
        candidates = [await self._registry.candidate(pid) for pid in sorted(pids)]
        return {each.key.pid: each.process for each in candidates if each is not None and each.visible_to(caller)}


class Looker(Protocol):
    """Inspects a process: in a process of our own, or through the attach helper service."""

    async def diagnose(self, pid: int, agent: KnownAgent) -> Diagnosis:
        """Diagnoses a process. Raises ProcessLookupError if it does not exist."""


class Diagnoser:
    """Diagnoses processes for callers. attaching: whether this daemon attaches agents at all; plugins: this daemon's;
    polls: the places where it answers libkineto's polls, None: none.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        attaching: bool = True,
        process: Looker | None = None,
        own_uid: int | None = None,
        polls: Callable[[], DoorState | None] = lambda: None,
        plugins: KnownPlugins | None = None,
    ) -> None:
        self._registry = registry
        self._attaching = attaching
        self._process: Looker = process or DiagnosisProcess()
        self._polls = polls
        self._own_uid = registry.own_uid if own_uid is None else own_uid
        self._plugins = plugins or KnownPlugins()

    async def diagnose(self, pid: int, caller: Caller) -> pb.Diagnosis:
        """Diagnoses a process for a caller. Raises InvalidRequest, NotFound, NotPermitted."""
        if pid <= 0:
            raise invalid("pid", f"must be greater than 0, got {pid}")
        process, _ = await self._describe(pid, caller)
        if refused := not_yours(process, self._own_uid):
            raise refused
        agent = KnownAgent(
            state=_AGENT_STATES.get(process.agent_state, ""),
            version=process.agent_version,
            attached=process.attached,
            capture_id=process.busy_capture_id,
            attaching=self._attaching,
        )
        try:
            found = await self._process.diagnose(pid, agent)
        except ProcessLookupError as exc:
            raise no_such_process(caller, pid, Action.SEE_PROCESS) from exc
        await self._registry.refresh([pid])
        now, candidate = await self._describe(pid, caller)  # it may have become another user's during the inspection
        if now.uid != process.uid:
            raise no_such_process(caller, pid, Action.SEE_PROCESS, now.uid)
        polls = polling_of_process(now, found.kineto, self._polls(), time.time_ns())
        stands = [*standing_findings([now]), *_stalled_findings(now)]
        return _to_proto(process, found, [*polls, *self._of_plugins(candidate), *stands])

    def _of_plugins(self, candidate: Candidate | None) -> Iterable[Finding]:
        if candidate is None:
            return ()
        if not candidate.facts.is_python and candidate.agent is None:
            return (Finding("plugins", Status.OK, "plug-ins work only in Python processes"),)
        seen = None if candidate.facts.hidden else candidate.facts.plugins
        offers = candidate.agent.hello.sources if candidate.agent is not None else None
        return of_process(self._plugins, seen=seen, offers=offers)

    async def _describe(self, pid: int, caller: Caller) -> tuple[pb.Process, Candidate | None]:
        """The process, and the registry's entry for it."""
        candidate = await self._registry.candidate(pid)
        if candidate is not None:
            if not candidate.visible_to(caller):
                raise no_such_process(caller, pid, Action.SEE_PROCESS, candidate.facts.uid)
            return candidate.process, candidate
        try:  # the registry knows no zombies
            found = await asyncio.to_thread(process_inspection.read_process, pid)
        except ProcessLookupError as exc:
            raise no_such_process(caller, pid, Action.SEE_PROCESS) from exc
        uid = max(found.uids[1], 0)
        if not may(caller, Action.SEE_PROCESS, Resource(uid=uid)):
            raise no_such_process(caller, pid, Action.SEE_PROCESS, uid)
        name = clean(found.name, 64)
        process = pb.Process(
            pid=pid, uid=uid, user=str(uid), command=[name], agent_state=pb.AGENT_STATE_NONE, iterations=-1
        )
        return process, None


def standing_findings(processes: Iterable[pb.Process]) -> Iterable[Finding]:
    """A problem for each process in which a call of ours into a vendor's library is stuck."""
    for process in processes:
        if process.HasField("standing"):
            call = process.standing
            text = standing_text(call, process.pid, lasted(call.since_ns, time.time_ns()))
            yield Finding("standing_call", Status.PROBLEM, text, _STANDING_ADVICE)


def _stalled_findings(process: pb.Process) -> Iterable[Finding]:
    if process.stalled_ns:
        text = f"no step for {format_duration(process.stalled_ns)}, many times longer than the latest steps took"
        yield Finding("steps", Status.NOTE, text, f"`kinetoctl stacks {process.pid}` shows where it is waiting")


def _to_proto(process: pb.Process, diagnosis: Diagnosis, more: Iterable[Finding]) -> pb.Diagnosis:
    checks = [to_check(finding) for finding in (*diagnosis.findings, *more)]
    return pb.Diagnosis(process=process, method=clean(diagnosis.method, 64), checks=checks)


def to_check(finding: Finding) -> pb.Check:
    """The public form of a finding."""
    return pb.Check(
        name=finding.name,
        status=f"CHECK_STATUS_{finding.status}",
        detail=clean(finding.detail, _MAX_TEXT_CHARS),
        advice=clean(finding.advice, _MAX_TEXT_CHARS),
    )


# Problems with reading the GPUs, as checks for people. Pure.
def gpu_findings(snapshot: Snapshot, present: Mapping[str, int]) -> tuple[Finding, ...]:
    """One for each library, for each lost GPU, and for the unit activity that is counted on each group of GPUs.

    present: number of GPUs of the kernel's drivers, by vendor (`gpu_metrics.present`).
    """
    return (
        *(_of_library(each, snapshot, present) for each in snapshot.libraries),
        *_lost(snapshot),
        *_activity(snapshot),
    )


def _of_library(library: VendorLibrary, snapshot: Snapshot, present: Mapping[str, int]) -> Finding:
    vendors, name = VENDORS.get(library.name, ()), f"gpus_{library.name}"
    products = " or ".join(_PRODUCTS[vendor] for vendor in vendors) or library.name
    if library.state is LibraryState.OK:
        count = sum(gpu.vendor in vendors for gpu in snapshot.gpus)
        return Finding(
            name, Status.OK, f"{times(count, 'GPU')}, driver {library.driver_version or 'version unknown'}", ""
        )
    if not any(present.get(vendor) for vendor in vendors):
        return Finding(name, Status.OK, f"no {products} GPU on this host", "")
    advice = _advised(*_ADVICE.get((library.name, library.state), (_RESTARTS.get(library.name, ""),)))
    if library.name in _BESIDE_THE_KERNEL and any(gpu.vendor in vendors for gpu in snapshot.gpus):
        detail = f"GPUs are measured only through the kernel's files, which provide less: {library.detail}"
        return Finding(name, Status.NOTE, detail, advice)
    return Finding(name, Status.NOTE, f"GPUs cannot be measured: {library.detail}", advice)


def _advised(text: str, package: str = "") -> str:
    return f"{text}, and {install_advice(package)}" if package else text


def _lost(snapshot: Snapshot) -> Iterator[Finding]:
    for gpu in snapshot.gpus:
        if not gpu.works:
            detail = f"GPU {gpu.index} ({gpu.uuid or 'UUID unknown'}) has fallen off the bus or must be reset"
            yield Finding("gpu_lost", Status.PROBLEM, detail, "drain the host, then reset the GPU or reboot")


def _activity(snapshot: Snapshot) -> Iterator[Finding]:
    """Which activity is counted on NVIDIA's GPUs: one finding for all GPUs with the same result."""
    alike: dict[tuple[Status, str, str], list[int]] = {}
    for gpu in snapshot.gpus:
        if gpu.works and (gpu.activity is not None or gpu.activity_note):
            alike.setdefault(_activity_of(gpu), []).append(gpu.index)
    for (status, detail, advice), indexes in alike.items():
        numbers = ", ".join(map(str, indexes))
        yield Finding(_ACTIVITY, status, f"{detail}: GPU {numbers}", advice)


def _activity_of(gpu: GpuState) -> tuple[Status, str, str]:
    if gpu.activity is None:
        status = Status.OK if gpu.activity_note == OFF else Status.NOTE
        detail = f"GPU unit activity is not measured ({gpu.activity_note})"
        return status, detail, _advised(*_ACTIVITY_ADVICE.get(gpu.activity_note, ("",)))
    missing = [name for name in NAMES if gpu.activity.seconds and name not in gpu.activity.totals]
    without = f", except {', '.join(missing)}" if missing else ""
    return Status.OK, f"GPU unit activity is measured{without}", ""
