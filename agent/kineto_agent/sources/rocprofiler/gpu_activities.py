"""AMD GPU activities and HIP's calls through rocprofiler-sdk.

Theory of operation
    The kit does the recording (sources/kit, agent/native/rocprofiler). This module decides which copy of the library to
    use, whether it can record in this process now, and what a recording leaves behind. rocprofiler serves several
    clients at a time, so the session never yields: torch's own profiler records beside it. Once configured, our client
    stays for the life of the process; between captures it only listens to the loading of kernels, whose names are
    reported once.
"""

import os
import sys
from collections import Counter
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple

from kineto_agent.protocol.records import ROCPROFILER_FORMAT
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.kit import kit_session
from kineto_agent.sources.torch import device_profilers
from kineto_agent.system import env
from kineto_agent.system.mappings import mapped_files

_SDK, _HIP = "librocprofiler-sdk.so", "libamdhip64.so"
_NAMES = ("librocprofiler-sdk.so.1", _SDK)  # of an installation; of torch's wheels
_MARKER = "kineto_agent_rocprofiler"  # attribute of sys: the process in which our client has been configured
_TOOL = "libkineto_rocprofiler.so"  # loaded by `kinetoctl run`: rocprofiler has asked it for a client
# The kinds of records of each activity type. rocprofiler_buffer_tracing_kind_t, and those of
# agent/native/rocprofiler/hip_calls.h: 60 HIP's runtime, 61 its compiler. Calls supply the streams of kernels and
# copies, and the names of kernels that were loaded before us: so they are recorded as well. The kind 1 stands for all
# of HSA's.
_HIP_CALLS = 60
KINDS: Dict[str, Tuple[int, ...]] = {
    "kernel": (11, _HIP_CALLS),
    "gpu_memcpy": (10, _HIP_CALLS),
    "cuda_runtime": (_HIP_CALLS, 61),
    "cuda_driver": (1,),
    "rocm_memory": (16,),
    "rocm_scratch": (12,),
}
ALL_ALLOCATIONS = 62  # includes HIP's stream-ordered allocation calls
# HSA is the layer below HIP: its calls add little to HIP's, and there are thousands of them.
ON_REQUEST: FrozenSet[str] = frozenset(("cuda_driver", "rocm_memory", "rocm_scratch"))
_LEFT = (
    "rocprofiler-sdk has set %s in this process; programs that it starts inherit these variables, which can break "
    "profiling there. They are needed here until HIP has initialised"
)
_NO_LIBRARY = (
    "HIP is not loaded in this process, or there is no librocprofiler-sdk beside it (ROCm 7.0 and later have one)"
)
VENDOR = kit_session.Vendor(
    name="rocprofiler",
    title="rocprofiler-sdk",
    code="ROCPROFILER",
    format=ROCPROFILER_FORMAT,
    kinds=KINDS,
)
ANYTIME, LATE_START = 10302, 10300
_HANGS = range(10302, 10305)
INTERPOSITION = "ROCPROFILER_QUEUE_INTERPOSITION"
_RUN = "start the program with `kinetoctl run -- …`, which sets ROCP_TOOL_LIBRARIES; any version can record it then"
_LOCKED = (
    "rocprofiler-sdk %s has already been configured in this process (by torch's profiler, JAX or another tool), and "
    "accepts no more clients; 1.3.2 and later do. Record with torch's profiler in the program, or " + _RUN
)
_TOO_LATE = (
    "HIP has already initialised in this process, so rocprofiler-sdk %s would record nothing of it; 1.3.0 and "
    "later would. For this version, " + _RUN
)
_HANG = (
    "rocprofiler-sdk %s can hang a program whose kernels it records (fixed in 1.3.5). Use ROCm 10, or set "
    + INTERPOSITION
    + "=0 and "
    + _RUN
)
_OVER = "another user of rocprofiler-sdk has shut it down in this process, for good; start the program again"
_BEGINNING = "rocprofiler-sdk is being configured in this process at the moment: try again"
_UNKNOWN = (
    "%s is rocprofiler-sdk %s, whose records this agent does not know, so it is not used. Known versions: %s. "
    "Update kineto-agent and kinetod, or use a ROCm with one of these"
)
# Major and minor number -> ROCm releases that carry it.
RELEASES: Dict[Tuple[int, int], str] = {
    (1, 0): "7.0",
    (1, 1): "7.1, 7.2",
    (1, 2): "7.2",
    (1, 3): "7.2.4, 7.13, 7.14, 10.0.0",
    (1, 4): "10.0.1",
}


def find(environ: Mapping[str, str] = os.environ, maps: str = "/proc/self/maps") -> Optional[str]:
    """Path of the library to use; None if HIP is not in the process, or without such a library."""
    loaded = mapped_files(_SDK, maps)
    if loaded:
        return loaded[0]
    hip = mapped_files(_HIP, maps)
    if not hip:
        return None
    explicit = "" if env.is_elevated() else environ.get(env.ROCPROFILER_LIBRARY, "")
    if explicit:
        return explicit
    for folder in (os.path.dirname(path) for path in hip):
        for name in _NAMES:
            beside = os.path.join(folder, name)
            if os.path.exists(beside):
                return beside
    return None


class SdkState(NamedTuple):
    """facts: described in agent/native/rocprofiler/rocprofiler_vendor.c."""

    version: int  # 10000 * major + 100 * minor + patch
    facts: Dict[str, Any]


def state_of(path: str, maps: str = "/proc/self/maps") -> Optional[SdkState]:
    """The state of the library at `path`; None if the process has not loaded it."""
    import ctypes  # only where there is such a library

    from kineto_agent.system.libraries import Library

    try:
        library = Library(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        numbers = [ctypes.c_uint32() for _ in range(3)]
        library.rocprofiler_get_version(*map(ctypes.byref, numbers))
        initialised, finalised = ctypes.c_int(), ctypes.c_int()
        library.rocprofiler_is_initialized(ctypes.byref(initialised))
        library.rocprofiler_is_finalized(ctypes.byref(finalised))
    except (OSError, AttributeError):
        return None
    major, minor, patch = (number.value for number in numbers)
    facts = {
        "initialised": initialised.value,
        "finalised": finalised.value,
        "configured": sys.__dict__.get(_MARKER) == os.getpid() or bool(mapped_files(_TOOL, maps)),
        "runtime_up": runtime_is_up(),
    }
    return SdkState(10000 * major + 100 * minor + patch, facts)


def note_client() -> None:
    """Note that our client has been configured in this process."""
    sys.__dict__[_MARKER] = os.getpid()


def runtime_is_up(descriptors: str = "/proc/self/fd") -> bool:
    """Whether this process has AMD's device open, as an initialised runtime does."""
    try:
        return any(_target(os.path.join(descriptors, name)).endswith("/kfd") for name in os.listdir(descriptors))
    except OSError:
        return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # it has since been closed
        return ""


class RocprofilerSession(kit_session.KitSession):
    """One recording of rocprofiler's records."""

    def start(self) -> None:
        """Enable the activities. Raises SourceError if none of them works."""
        super().start()
        note_client()
        left = self._collector.describe().get("variables_left")
        if left:
            self._warnings.append(_LEFT % left)


class RocprofilerSource:
    """Activities of AMD GPUs."""

    name = "rocprofiler"
    on_request: FrozenSet[str] = ON_REQUEST

    def __init__(self, environ: Mapping[str, str] = os.environ, maps: str = "/proc/self/maps") -> None:
        self._environ = environ
        self._maps = maps

    def activity_types(self) -> List[str]:
        """All of them once the process has HIP and a librocprofiler-sdk can be found.

        None if rocprofiler cannot record now but torch's own profiler can: then the source of torch's operators does.
        If neither can, prepare() says why.
        """
        path = find(self._environ, self._maps)
        if path is None or (device_profilers.find() is not None and self._is_refused(path)):
            return []
        return sorted(KINDS)

    def _is_refused(self, path: str) -> bool:
        state = state_of(path, self._maps)
        return state is not None and refusal(state.version, path, state.facts, self._environ) is not None

    def would_yield(self, request: SourceRequest) -> bool:
        """False: rocprofiler serves both."""
        return False

    def prepare(self, request: SourceRequest) -> kit_session.KitSession:
        """Open the library, check that it can record, and create the arena. Raises SourceError."""
        from kineto_agent.sources.kit.kit_binding import Kit

        path = find(self._environ, self._maps)
        if path is None:
            raise SourceError("ROCPROFILER_LIBRARY", _NO_LIBRARY)
        collector = Kit.of_process().open(VENDOR.name, VENDOR.title, VENDOR.code, path)
        facts = collector.describe()
        refused = refusal(collector.version, path, facts, self._environ)
        if refused is not None:
            raise refused
        metadata = {"activity_types": sorted(request.activity_types), "devices": devices_of(facts)}
        vendor = VENDOR
        if request.options.get("profile_memory"):
            vendor = VENDOR._replace(kinds={name: (*kinds, ALL_ALLOCATIONS) for name, kinds in KINDS.items()})
        return kit_session.prepare(vendor, path, request, yields=False, metadata=metadata, session=RocprofilerSession)


def devices_of(facts: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """The GPUs as Kineto's deviceProperties, by ordinal, as far as known.

    pci_bus_id is the whole GPU's address, as the kernel writes it.
    """
    found = []
    gpus = [agent for agent in facts.get("agents", ()) if agent.get("gpu")]
    places = Counter(map(_place, gpus))
    for agent in gpus:
        known = {
            "id": agent["ordinal"],
            "pci_bus_id": _address(agent) if places[_place(agent)] == 1 else "",
            "name": agent["name"],
            "totalGlobalMem": agent["memory_bytes"],
            "maxThreadsPerBlock": agent["workgroup_most"],
            "maxThreadsPerMultiprocessor": agent["waves_per_unit"] * agent["wavefront"],
            "warpSize": agent["wavefront"],
            "sharedMemPerBlock": agent["lds_kb"] << 10,
            "numSms": agent["compute_units"],
            "arch": agent["arch"],
        }
        found.append({key: value for key, value in known.items() if value or key == "id"})
    return sorted(found, key=lambda device: device["id"])


def _place(agent: Mapping[str, Any]) -> Tuple[int, int]:
    """Domain, and bus and device, which are common to the partitions of a GPU."""
    return agent["domain"], (agent["location"] & 0xFFFF) >> 3


def _address(agent: Mapping[str, Any]) -> str:
    """The PCI address; empty for a partition of a GPU: the kernel's driver puts the number above the address, later
    ones into it.

    Source: kfd_topology_add_device() of the Linux kernel.
    """
    location = agent["location"]
    if location >> 16:
        return ""
    return "%04x:%02x:%02x.%d" % (agent["domain"], location >> 8, location >> 3 & 0x1F, location & 7)


# Determines whether rocprofiler-sdk can record in this process now. Pure: facts in, an error out.
#
# rocprofiler accepts a client's requests only while it is being configured, and sees the runtimes (HIP, HSA) that
# register with it. The options of a late client depend on the version:
#
#     from 1.3.2 on    clients may be configured at any time
#     1.3.0, 1.3.1     only if no client has been configured; registered runtimes are replayed
#     below 1.3.0      only if no client has been configured, and before HIP has initialised: otherwise nothing would be
#                      recorded, silently
#
# Where torch is built for ROCm, its own profiler (Kineto) is configured when HIP initialises.
#
# 1.3.2 to 1.3.4 may hang a program whose kernels they record (rocm-systems 7796 and 7924, vllm 54087), unless a
# variable tells them at process start to leave its queues alone. Like versions before 1.3.0, they do not see queues
# created earlier.
#
# In a process that was started by `kinetoctl run` all versions work: our client is configured with the others.
def refusal(version: int, path: str, facts: Mapping[str, Any], environ: Mapping[str, str]) -> Optional[SourceError]:
    """Why this library cannot record now; None if it can.

    version: 10000 * major + 100 * minor + patch. facts: of agent/native/rocprofiler/rocprofiler_vendor.c. environ: of
    the process.
    """
    text = text_of(version)
    if (version // 10000, version // 100 % 100) not in RELEASES:
        known = ", ".join("%d.%d (ROCm %s)" % (*numbers, release) for numbers, release in sorted(RELEASES.items()))
        return SourceError("ROCPROFILER_UNKNOWN_VERSION", _UNKNOWN % (path, text, known))
    if facts.get("finalised"):
        return SourceError("ROCPROFILER_FINALIZED", _OVER)
    if version in _HANGS and environ.get(INTERPOSITION) != "0":
        return SourceError("ROCPROFILER_HANGS", _HANG % text)
    if facts.get("configured"):
        return None
    if facts.get("initialised", 0) < 0:
        return SourceError("ROCPROFILER_BUSY", _BEGINNING)
    if facts.get("initialised") and version < ANYTIME:
        return SourceError("ROCPROFILER_LOCKED", _LOCKED % text)
    if facts.get("runtime_up") and (version < LATE_START or version in _HANGS):
        return SourceError("ROCPROFILER_TOO_LATE", _TOO_LATE % text)
    return None


def text_of(version: int) -> str:
    """Formats 10305 as "1.3.5"."""
    return "%d.%d.%d" % (version // 10000, version // 100 % 100, version % 100)
