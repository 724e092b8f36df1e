"""NVIDIA GPU activities and CUDA calls through CUPTI's activity interface.

Theory of operation
    The C collector (agent/native/cupti) does the work: CUPTI's callbacks, buffers and names. This module decides which
    libcupti to use, whether its record layouts are known, which activity kinds and API calls to record, how to explain
    a refusal, and whether CUPTI may be detached afterwards.
"""

import _thread
import os
import time
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional

from kineto_agent.protocol.records import CUPTI_FORMAT
from kineto_agent.sources.cupti import libcupti
from kineto_agent.sources.cupti.activity_kinds import KINDS
from kineto_agent.sources.cupti.known_versions import KERNEL_NAME_OFFSETS, KNOWN, RELEASES
from kineto_agent.sources.interface import (
    DEVICE_GRAPHS,
    SourceCounts,
    SourceError,
    SourceOutcome,
    SourceRequest,
    Takeover,
)
from kineto_agent.sources.kit.limits import (
    FLUSH_PERIOD_MS,
    GIVE_WAY_LIMIT_MS,
    PREFAULT_BYTES,
    STOP_LIMIT_MS,
    STRINGS_BYTES,
    stop_warnings,
    thread_buffer_bytes,
)

if TYPE_CHECKING:
    from kineto_agent.sources.cupti.collector_binding import Collector, CollectorResult, DetachResult
    from kineto_agent.sources.native_interface import EnableResult

_KIND_TYPES = {kind: name for name, kinds in KINDS.items() for kind in kinds}

_CALL_KINDS = KINDS["cuda_runtime"] + KINDS["cuda_driver"]

# The recorded calls: those that put work on the device or wait for it (fnmatch patterns over cuptiGetCallbackName,
# whose names end in _vNNNN or _ptsz_vNNNN). All calls would make a launch-bound job 1.4 times slower. The collector
# records them itself, through CUPTI's subscriber (agent/native/cupti/call_records.c says what that saves), or not at
# all: CUPTI's own activity kinds would harm the tool that has the subscriber.
RUNTIME_CALLS = (
    "cudaLaunch*",
    "__cudaLaunch*",  # the toolkit's own entry, since CUDA 13
    "cudaGraphLaunch*",
    "cudaMemcpy*",
    "cudaMemset*",
    "cudaMemPrefetch*",
    "*Synchronize*",
    "cudaStreamWaitEvent*",
    "cudaEventRecord*",
    # Allocations that stop the device. Each takes microseconds to milliseconds, and a healthy program rarely makes
    # them, because of its caching allocator. Stream-ordered ones (cudaMallocAsync) are fast and frequent.
    *("cudaMalloc_v*", "cudaFree_v*", "cudaHostAlloc_v*", "cudaMallocHost_v*", "cudaFreeHost_v*"),
)
DRIVER_CALLS = (
    *("cuLaunch*", "cuGraphLaunch*", "cuMem*Async*"),
    *("cuMemAlloc_v*", "cuMemFree_v*", "cuMemCreate*", "cuMemMap*", "cuMemUnmap*", "cuMemRelease*"),
)
# With options["profile_memory"]: all allocations.
RUNTIME_MEMORY_CALLS = ("cudaMalloc*", "cudaFree*", "cudaHostAlloc*")
DRIVER_MEMORY_CALLS = ("cuMemAlloc*", "cuMemFree*", "cuMemCreate*", "cuMemMap*", "cuMemUnmap*", "cuMemRelease*")
_DRIVER_DOMAIN, _RUNTIME_DOMAIN = 1, 2

_HURRY_PERIOD_S = 0.01
DETACH_LIMIT_MS = 1000

# By cuptiGetVersion. 27 is CUDA 12.9.0: the first that drops and counts records when it is given no buffer.
DECLINE_VERSION = 27
# 24 is CUDA 12.6: before it, cuptiFinalize could crash a process that uses CUDA graphs.
DETACH_VERSION = 24

# Results that mean "another tool is in the way": NOT_COMPATIBLE, HARDWARE_BUSY, OLD_PROFILER_API_INITIALIZED,
# MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED.
_BUSY_RESULTS = (14, 26, 36, 39)
_MULTIPLE_SUBSCRIBERS = 39

_CALLS_LEFT_OUT = (
    "CUDA calls are not recorded, so kernels have no launches: another tool (or torch.profiler, once it has been used) "
    "holds CUPTI's only subscriber, and recording calls as well would make the program's next torch.profiler trace fail"
)
_DEVICE_GRAPHS = (
    "CUPTI was not used: device code in %s launches CUDA graphs. If such a graph was instantiated before CUPTI is "
    "attached, its next launch fails or hangs, which ends the program. Record activities that do not need CUPTI, such "
    "as --activities python_function"
)
_STUCK = (
    "cuptiFinalize has not returned: a thread of the program is blocked in it until the GPU is idle, and its launches "
    "wait"
)
_GAVE_WAY = (
    "stayed attached: %s started and is using CUPTI now; CUDA calls stay slightly slower until the process ends or a "
    "later capture detaches CUPTI"
)
_STAYS = (
    "stays attached because of %s: detaching CUPTI could end the program at a later launch of such a graph; until the "
    "process ends, each launch of a graph takes about 0.4 us more CPU time for each of its nodes"
)
_WHY_STAYS = {  # bits of kc_stay (agent/native/cupti/collector.h)
    1: "CUDA graphs (launched while GPU activities were recorded)",
    2: "CUDA graphs that may have been launched while GPU activities were recorded (launches could not be "
    "observed, for example because another tool had CUPTI's only subscriber)",
    4: "another tool's use of CUPTI in this process (it may have recorded CUDA graphs)",
}
_NOT_INITIALIZED = 15
# The daemon adds how much memory each GPU has: it can query that without a call in this process.
_NO_MEMORY = (
    "CUPTI could not initialise in this process (%s): it needs about 16 MiB of memory on each GPU that the process uses"
)
_TORCH_PROFILER = "the program's own torch.profiler"
_IN_USE = (
    "another profiler is using CUPTI in this process (%s), and CUPTI serves only one: a capture would take its "
    "records; try again once it has finished"
)
_CHANGES_GRAPHS = (
    "%s changes CUDA graphs while they run, and CUPTI may crash a program that does so while a recording begins. "
    "This is prevented on x86-64 only. Record without the GPU: --activities cpu_op,python_function"
)
_UNNOTICED = "a profiler of the program that uses CUPTI and starts during a capture may lose records: %s"


class CuptiSession:
    """One recording of CUPTI activities.

    CUPTI's kinds, buffer callbacks and subscriber belong to the whole process: Kineto, once the program's own profiler
    has started it, uses the same. So the recording ends before that (give_way), and CUPTI is not touched afterwards:
    disabling a kind would disable it for Kineto. The collector itself notices any other user of CUPTI
    (agent/native/cupti/cupti_gate.c) and ends the recording on that user's thread; taken() reports it.
    """

    format = CUPTI_FORMAT

    def __init__(
        self,
        collector: "Collector",
        arena_fd: int,
        metadata: Dict[str, Any],
        request: SourceRequest,
        detach_limit_ms: int,
        yields: bool = True,
        maps: str = "/proc/self/maps",
    ) -> None:
        self._maps = maps
        self.yields = yields
        self.arena_fd = arena_fd
        self.metadata = metadata
        self._collector = collector
        self._kinds = [kind for name in KINDS if name in request.activity_types for kind in KINDS[name]]
        self._named = request.named
        self._tell_call = request.tell_call
        self._detach_limit_ms = detach_limit_ms
        self._warnings: List[str] = []
        self._incomplete = ""
        self._enable_ns = 0
        # The collector's functions run one at a time. A signal handler may enter on the same thread again.
        self._lock = _thread.RLock()
        self._begun = self._wanted = self._gave_way = False  # the last two: by and for the program's own profiler
        self._hurried = False
        self._stopped: Optional[CollectorResult] = None
        self._stop_limit_ms = 0
        self._closed = False
        self._taken: Optional[Takeover] = None

    def start(self) -> None:
        """Enable the activities. Raises SourceError if none of them works."""
        begin = time.perf_counter_ns()
        with self._lock:
            self._refuse_if_wanted()
            self._begun = True
            try:
                self._start()
            finally:
                if self._wanted:  # its thread has not waited for us
                    self._release(GIVE_WAY_LIMIT_MS)
        self._enable_ns = time.perf_counter_ns() - begin

    def _start(self) -> None:
        calls = [kind for kind in self._kinds if kind in _CALL_KINDS]
        subscribed = self._subscribe()
        self._refuse_if_wanted()
        self._look_for_others(subscribed)
        through_subscriber = subscribed == 0
        self._kinds = [kind for kind in self._kinds if kind not in _CALL_KINDS]
        if calls and not through_subscriber:
            self._leave_out_calls()
        enabled = self._collector.start(self._kinds)
        refused = {kind: result for kind, result in enabled.results.items() if result != 0}
        if enabled.code != 0 and self.taken() is not None:
            raise SourceError("USER_PROFILER_STARTED", "%s started" % self._holder)
        if enabled.code != 0:
            raise self._refusal(enabled, refused)
        for kind, result in sorted(refused.items()):
            self._warnings.append(
                "CUPTI refused to record %s: %s" % (_KIND_TYPES[kind], self._collector.result_text(result))
            )
        if through_subscriber:
            self._record_calls(calls)

    def _subscribe(self) -> int:
        begun_ns = time.time_ns()
        self._tell_call("cuptiSubscribe", lambda: begun_ns)
        try:
            return self._collector.subscribe()
        except SourceError:
            self._refuse_if_wanted()  # give_way() ended the wait for the GPU
            raise
        finally:
            self._tell_call("cuptiSubscribe", lambda: self._collector.others().standing_ns)

    def _refuse_if_wanted(self) -> None:
        if self._wanted:
            raise SourceError("USER_PROFILER_STARTED", "the program's own torch.profiler started")

    def _look_for_others(self, subscribed: int) -> None:
        """Raises SourceError if another profiler uses CUPTI."""
        others = self._collector.others()
        held = subscribed == _MULTIPLE_SUBSCRIBERS and not libcupti.only_kineto(self._maps)
        library = self.metadata["cupti_library"]
        listens = ""
        if others.listener and not others.ended:
            listens = libcupti.unsubscribed_listener(others.listener, library, self._maps)
        if held or others.in_use or listens:
            known = ", ".join(libcupti.session_users(self._maps))
            state = "it holds the only subscriber" if held else "it has enabled activities (%d)" % others.in_use
            if listens and not held and not others.in_use:
                state = "the buffers belong to %s, which may still be recording" % listens
            raise SourceError("CUPTI_BUSY", _IN_USE % (state + (", and may be " + known if known else "")))
        if others.unnoticed:
            self._warnings.append(_UNNOTICED % others.unnoticed.decode("utf-8", "replace"))

    def taken(self) -> Optional[Takeover]:
        """The user other than torch.profiler that has taken CUPTI: the recording has ended and must not touch it any
        more.
        """
        if self._taken is None and not self._closed:
            others = self._collector.others()
            if others.time_ns:
                self._taken = Takeover(others.time_ns, libcupti.library_at(others.caller, self._maps))
        return self._taken

    @property
    def _holder(self) -> str:
        """The name of the user that has taken CUPTI from us."""
        taken = self.taken()
        return _TORCH_PROFILER if taken is None else "another user of CUPTI in the program (%s)" % taken.who

    def _leave_out_calls(self) -> None:
        """Leave out CUDA calls: recording them by CUPTI's own kinds made the program's next torch.profiler session
        raise.
        """
        if not self._kinds:
            raise SourceError("CUPTI_BUSY", _CALLS_LEFT_OUT)
        if self._named:
            self._incomplete = _CALLS_LEFT_OUT
        else:
            self._warnings.append(_CALLS_LEFT_OUT)

    def _record_calls(self, calls: List[int]) -> None:
        why = self._collector.record_calls() if calls else ""
        if why and not self._kinds:
            raise SourceError("CUPTI_FAILED", "CUPTI cannot record CUDA calls in this process: " + why)
        if why:
            self._warnings.append("CUDA calls are not recorded: CUPTI refused: " + why)

    def give_way(self) -> None:
        """End the recording and release CUPTI, within GIVE_WAY_LIMIT_MS. Does not wait for a detach.

        Another thread is inside CUPTI if that takes longer. There the program would wait just as well, and this thread
        releases CUPTI once it is out.
        """
        self._wanted = True
        deadline = time.monotonic() + GIVE_WAY_LIMIT_MS / 1000
        while not self._lock.acquire(timeout=_HURRY_PERIOD_S):
            self._collector.hurry()
            if time.monotonic() >= deadline:
                return
        try:
            self._release(max(int((deadline - time.monotonic()) * 1000), 1))
        finally:
            self._lock.release()

    def _release(self, limit_ms: int) -> None:
        if self._gave_way or self._closed or not self._begun:
            return
        self._gave_way = True
        if self._stopped is None:
            self._stop_collector(limit_ms)
            self._stop_limit_ms = GIVE_WAY_LIMIT_MS
            self._warnings.append(_GAVE_WAY % self._holder)
        self._collector.yield_subscriber()

    def hurry(self) -> None:
        """Skip the detach, and do not wait for one in progress, because the process exits."""
        self._hurried = True
        self._collector.hurry()

    def _stop_collector(self, limit_ms: int) -> "CollectorResult":
        if self._stopped is None:
            self._stop_limit_ms = limit_ms
            self._stopped = self._collector.stop(limit_ms)
        return self._stopped

    def _refusal(self, enabled: "EnableResult", refused: Mapping[int, int]) -> SourceError:
        details = ["%s: %s" % (_KIND_TYPES[kind], self._collector.result_text(rc)) for kind, rc in refused.items()]
        text = "; ".join([enabled.error, *details])
        if any(result in _BUSY_RESULTS for result in refused.values()):
            return SourceError(
                "CUPTI_BUSY",
                "another profiler holds CUPTI in this process (%s): the Nsight Systems or Nsight Compute that it runs "
                "under, its own torch.profiler, or another library with a CUPTI subscriber; end it, then try again"
                % text,
            )
        if self._collector.result_text(_NOT_INITIALIZED) in text:
            return SourceError("CUPTI_NOT_INITIALIZED", _NO_MEMORY % text)
        return SourceError("CUPTI_FAILED", "CUPTI cannot record in this process: " + text)

    def counts(self) -> SourceCounts:
        """Records and bytes that the daemon can read so far."""
        with self._lock:
            counts = self._stopped.counts if self._stopped is not None else self._collector.counts()
        return SourceCounts(counts.records, counts.bytes, counts.dropped)

    def stop(self) -> SourceOutcome:
        """Make everything READY, then take CUPTI out of the process where that is safe."""
        with self._lock:
            stopped = self._stop_collector(STOP_LIMIT_MS if self.taken() is None else GIVE_WAY_LIMIT_MS)
            text = self._collector.result_text
            self._warnings += stop_warnings("CUPTI", stopped, self._stop_limit_ms, stopped.calls_unnamed, text)
            if self._wanted:
                self._release(GIVE_WAY_LIMIT_MS)
            if self.taken() is not None and not self._gave_way:
                self._gave_way = True
                self._warnings.append(_GAVE_WAY % self._holder)
            detach_ns = 0 if stopped.timed_out or self._gave_way or self._hurried else self._detach()
        return SourceOutcome(
            counts=SourceCounts(stopped.counts.records, stopped.counts.bytes, stopped.counts.dropped),
            metadata={"cupti_enable_ns": self._enable_ns, "cupti_flushes": stopped.flushes},
            warnings=self._warnings,
            detach_ns=detach_ns,
            cpu_ns=stopped.cpu_ns,
            incomplete=self._incomplete,
        )

    def _detach(self) -> int:
        version = self.metadata["cupti_version"]
        if version < DETACH_VERSION:
            self._warnings.append(
                "stayed attached: detaching CUPTI %d is not safe with CUDA graphs (it is from CUDA 12.6 on); CUDA "
                "calls stay slightly slower until the process ends" % version
            )
            return 0
        result = self._collector.detach(self._detach_limit_ms)
        warning = self._detach_warning(result)
        if warning:
            self._warnings.append(warning)
            return 0
        return result.ns

    def _detach_warning(self, detach: "DetachResult") -> str:
        from kineto_agent.sources.cupti import collector_binding, gpu_drain

        if detach.outcome == collector_binding.DETACHED:
            return ""
        if detach.outcome == collector_binding.STUCK:
            self._incomplete = _STUCK
            self._tell_call("cuptiFinalize", lambda: self._collector.others().standing_ns)
            return "stayed attached: " + _STUCK
        if self._wanted or self.taken() is not None:
            return _GAVE_WAY % self._holder
        if detach.outcome == collector_binding.NO_CALL:
            return (
                "stayed attached: the process made no CUDA call for %g s; CUDA calls stay slightly slower until the "
                "next capture detaches CUPTI" % (self._detach_limit_ms / 1000)
            )
        if detach.outcome == collector_binding.SUBSCRIBED_ELSEWHERE:
            return (
                "stayed attached: another tool (or torch.profiler, once it has been used) holds CUPTI's only "
                "subscriber; CUDA calls stay slightly slower"
            )
        if detach.outcome == collector_binding.MUST_STAY:
            return _STAYS % " and of ".join(why for bit, why in _WHY_STAYS.items() if detach.result & bit)
        if detach.outcome == collector_binding.BUSY:
            return gpu_drain.STAYS % collector_binding.why_busy(detach.result, detach.ns)
        return "stayed attached: CUPTI refused to detach: " + self._collector.result_text(detach.result)

    def close(self) -> None:
        """Free the arena."""
        with self._lock:
            self._closed = True
            self._collector.close()


class CuptiSource:
    """Activities of NVIDIA GPUs.

    A subclass may record in another process: it overrides find_library, load_collector and describe_devices.
    """

    name = "cupti"
    # on an H200 a launch-bound step takes 1.34 times as long with it, 1.24 without
    on_request = frozenset(("cuda_sync",))

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        maps: str = "/proc/self/maps",
        detach_limit_ms: int = DETACH_LIMIT_MS,
    ) -> None:
        self._environ = environ
        self._maps = maps
        self._detach_limit_ms = detach_limit_ms

    def find_library(self) -> Optional[str]:
        """Path of the libcupti to use, as the process sees it; None if there is nothing to trace."""
        return libcupti.find(self._environ, self._maps)

    def load_collector(self) -> "Collector":
        """The process's collector. Raises SourceError."""
        from kineto_agent.sources.cupti import collector_binding

        return collector_binding.Collector.of_process()

    def describe_devices(self, collector: "Collector") -> Dict[str, Any]:
        """Facts about CUDA's devices and versions, as far as known."""
        from kineto_agent.sources.cupti import cuda_devices

        return cuda_devices.describe(collector.device)

    def activity_types(self) -> List[str]:
        """All types, once the process has CUDA and a libcupti can be found."""
        return sorted(KINDS) if self.find_library() else []

    def would_yield(self, request: SourceRequest) -> bool:
        """True: CUPTI serves only one of the two."""
        return True

    def prepare(self, request: SourceRequest) -> CuptiSession:
        """Open libcupti and create the arena. Raises SourceError."""
        from kineto_agent.sources.cupti import collector_binding, gpu_drain

        if request.options.get(DEVICE_GRAPHS):
            raise SourceError("CUDA_DEVICE_GRAPHS", _DEVICE_GRAPHS % request.options[DEVICE_GRAPHS])
        path = self.find_library()
        if path is None:
            raise SourceError("CUPTI_LIBRARY", "this process has no CUDA, or no libcupti can be found for it")
        collector = self.load_collector()
        version = collector.open(path)
        if version not in KNOWN:
            raise SourceError("CUPTI_UNKNOWN_VERSION", _unknown_version(version, path))
        changing = libcupti.changes_graphs(self._maps)
        if changing and os.uname().machine != "x86_64":  # callback_tables.c reads x86-64 only
            raise SourceError("CUPTI_CHANGES_GRAPHS", _CHANGES_GRAPHS % changing[0])
        moment = gpu_drain.await_moment(collector, request.gpu_drain_ms)
        arena_fd = collector.prepare(
            collector_binding.CollectorConfig(
                buffer_limit_bytes=request.buffer_limit_bytes,
                buffer_bytes=thread_buffer_bytes(request.buffer_limit_bytes),
                strings_bytes=STRINGS_BYTES,
                prefault_bytes=PREFAULT_BYTES,
                flush_period_ms=FLUSH_PERIOD_MS,
                kernel_name_offset=KERNEL_NAME_OFFSETS[version],
                may_decline=int(version >= DECLINE_VERSION),
            )
        )
        _keep_calls(collector, request)
        metadata = {
            "cupti_version": version,
            "cupti_library": path,
            **moment,
            **self.describe_devices(collector),
        }
        yields = self.would_yield(request)
        return CuptiSession(collector, arena_fd, metadata, request, self._detach_limit_ms, yields, self._maps)


def _keep_calls(collector: "Collector", request: SourceRequest) -> None:
    memory = bool(request.options.get("profile_memory"))
    if "cuda_runtime" in request.activity_types:
        collector.keep_calls(_RUNTIME_DOMAIN, RUNTIME_CALLS + (RUNTIME_MEMORY_CALLS if memory else ()))
    if "cuda_driver" in request.activity_types:
        collector.keep_calls(_DRIVER_DOMAIN, DRIVER_CALLS + (DRIVER_MEMORY_CALLS if memory else ()))


def _unknown_version(version: int, path: str) -> str:
    known = ", ".join("%d (CUDA %s)" % (number, RELEASES[number]) for number in sorted(KNOWN))
    return (
        "%s is CUPTI version %d, whose record layouts this agent does not know, so it is not used. Known versions: "
        "%s. Update kineto-agent and kinetod, or name a known library in KINETO_CUPTI_LIBRARY before the process "
        "starts" % (path, version, known)
    )
