"""AMD GPU activities and HIP's calls through rocprofiler-sdk.

Theory of operation
    The kit does the recording (sources/kit, agent/native/rocprofiler). This module decides which copy of the library to
    use, whether it can record in this process now (start_conditions.py), and what a recording leaves behind.

    rocprofiler serves several clients at a time, so the session yields to nobody: torch's own profiler records beside
    it. Once configured, our client stays for the life of the process; between captures it listens to the loading of
    kernels alone, whose names are told but once.
"""

import os
from collections import Counter
from typing import Any, Dict, FrozenSet, List, Mapping, Tuple

from kineto_agent.protocol.records import ROCPROFILER_FORMAT
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.kit import kit_session
from kineto_agent.sources.rocprofiler import library_state, librocprofiler
from kineto_agent.sources.rocprofiler.activity_kinds import ALL_ALLOCATIONS, KINDS, ON_REQUEST
from kineto_agent.sources.rocprofiler.start_conditions import refusal
from kineto_agent.sources.torch import device_profilers

_LEFT = (
    "rocprofiler-sdk has set %s in this process, which a program that it starts inherits and which can break profiling "
    "there; they are needed here until HIP has initialised"
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


class RocprofilerSession(kit_session.KitSession):
    """One recording of rocprofiler's records."""

    def start(self) -> None:
        """Enable the activities. Raises SourceError if none of them works."""
        super().start()
        library_state.note_client()
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

        None where rocprofiler cannot record now and torch's own profiler can: the source of torch's operators does it
        then. Where nobody can, prepare() says why.
        """
        path = librocprofiler.find(self._environ, self._maps)
        if path is None or (device_profilers.find() is not None and self._is_refused(path)):
            return []
        return sorted(KINDS)

    def _is_refused(self, path: str) -> bool:
        state = library_state.look(path, self._maps)
        return state is not None and refusal(state.version, path, state.facts, self._environ) is not None

    def would_yield(self, request: SourceRequest) -> bool:
        """No: rocprofiler serves both."""
        return False

    def prepare(self, request: SourceRequest) -> kit_session.KitSession:
        """Open the library, look whether it can record, and make the arena. Raises SourceError."""
        from kineto_agent.sources.kit import kit_binding

        path = librocprofiler.find(self._environ, self._maps)
        if path is None:
            raise SourceError("ROCPROFILER_LIBRARY", _NO_LIBRARY)
        collector = kit_binding.load().open(VENDOR.name, VENDOR.title, VENDOR.code, path)
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
    """The GPUs as Kineto's deviceProperties, in the order of their ordinals; only what is known.

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
    """Domain, and bus and device, which the partitions of a GPU share."""
    return agent["domain"], (agent["location"] & 0xFFFF) >> 3


def _address(agent: Mapping[str, Any]) -> str:
    """Empty for a partition of a GPU: the kernel's driver writes its number above the address, later ones into it.

    Source: kfd_topology_add_device() of the Linux kernel.
    """
    location = agent["location"]
    if location >> 16:
        return ""
    return "%04x:%02x:%02x.%d" % (agent["domain"], location >> 8, location >> 3 & 0x1F, location & 7)
