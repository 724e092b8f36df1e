"""Activities of Intel GPUs and calls of Level Zero and SYCL through Intel's PTI (libpti_view).

Theory of operation
    The kit does the recording (sources/kit, agent/native/pti). This module decides whether PTI may be used at all, by
    checks in an order in which none can do harm: PTI calls abort() if it finds no driver or no device, a forked child
    waits forever for a PTI thread that only its parent has, and the layout of records depends on the version. So Level
    Zero is queried before PTI is loaded, the version is read before any other call of PTI, and its exit handlers are
    guarded before PTI creates its thread.

    Versions before 0.14 are refused. Once a thread has handed its launch over, another thread that waits for an event
    may finish and free it, and the first one uses it again: 0.12 writes three fields to it, overwriting whatever uses
    the memory by then (the program crashes at its exit, or elsewhere); 0.12 and 0.13 read the events and the command
    list of another command from it. A user of PTI cannot prevent this.

    PTI has one set of callbacks and one switch for each kind of record in a process, and PyTorch's profiler uses them,
    too: so the session yields to it.
"""

import os
import sys
from typing import Any, Dict, FrozenSet, List, Mapping, Tuple

from kineto_agent.protocol.records import PTI_FORMAT
from kineto_agent.sources.interface import SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.kit import kit_session
from kineto_agent.sources.pti import libpti
from kineto_agent.sources.pti.known_versions import KNOWN

# PTI cannot be flushed while it records: the contents of a thread's buffer are lost if the process is killed. Each
# thread that submits work has one.
BUFFER_BYTES = 1 << 20  # 6,000 kernels

_SAFE_FROM = (0, 14)  # older versions use launches that other threads have freed

_LEAKS_BEFORE = (1, 1)  # older versions leak the name of each recorded kernel
_LEAK_BYTES = 220  # at most, per kernel, until the process ends: 155 with 1.0
_LEAK_WORTH_SAYING = 100_000  # kernels

_MARKER = "kineto_agent_pti"  # attribute of sys: the process in which an agent has loaded PTI's core
_BUSY = (
    "another library of this process is using PTI, which serves only one: a capture would take its records; run "
    "the program without that library, or record other activities"
)
_FORKED = (
    "this process was forked from one that had used PTI, which does not work in such a child: use the spawn start "
    "method of multiprocessing in the program"
)
# Kineto's activity type -> pti_view_kind: the activity types that are recorded through PTI.
KINDS: Dict[str, Tuple[int, ...]] = {
    "kernel": (1,),  # DEVICE_GPU_KERNEL
    "gpu_memcpy": (8, 10),  # 10: between two devices
    "gpu_memset": (9,),
    "xpu_runtime": (6,),  # calls of SYCL
    "xpu_driver": (3,),  # calls of Level Zero
    "xpu_sync": (11,),
    "overhead": (5,),
}
# Recorded only on request. Calls and waits cost a record each; overhead is PTI's own.
ON_REQUEST = frozenset(("xpu_driver", "xpu_sync", "overhead"))
# Calls of SYCL reach PTI only if it was loaded before SYCL, as in torch, which needs both.
NEEDS_SYCL = frozenset(("xpu_runtime",))


class XpuSession(kit_session.KitSession):
    """One recording of PTI's records."""

    def stop(self) -> SourceOutcome:
        """Make everything READY."""
        outcome = super().stop()
        kept = outcome.counts.records
        if version_pair(self.metadata["pti_version"]) < _LEAKS_BEFORE and kept > _LEAK_WORTH_SAYING:
            outcome.warnings.append(
                "until the process ends, PTI %s keeps the names of all kernels that it has recorded, up to %d MB here; "
                "version 1.1 and later do not" % (self.metadata["pti_version"], kept * _LEAK_BYTES // 1_000_000)
            )
        return outcome


VENDOR = kit_session.Vendor(
    name="pti",
    title="PTI",
    code="PTI",
    format=PTI_FORMAT,
    kinds=KINDS,
    buffer_bytes=BUFFER_BYTES,
)


def version_pair(version: str) -> Tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


class XpuSource:
    """Activities of Intel GPUs."""

    name = "pti"
    on_request: FrozenSet[str] = ON_REQUEST

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        maps: str = "/proc/self/maps",
        stat: str = "/proc/self/stat",
    ) -> None:
        self._environ = environ
        self._maps = maps
        self._stat = stat

    def activity_types(self) -> List[str]:
        """Types that PTI can record now; none unless the process has Level Zero and there is a libpti_view."""
        if libpti.find(self._environ, self._maps) is None:
            return []
        return sorted(set(KINDS) - (frozenset() if libpti.sees_sycl(self._maps) else NEEDS_SYCL))

    def would_yield(self, request: SourceRequest) -> bool:
        """True: PTI serves only one of the two."""
        return True

    def prepare(self, request: SourceRequest) -> kit_session.KitSession:
        """Check that PTI may be used, load it and create the arena. Raises SourceError."""
        from kineto_agent.sources.pti.pti_binding import PtiChecks

        path = libpti.find(self._environ, self._maps)
        if path is None:
            raise SourceError(
                "PTI_LIBRARY", "this process has not loaded Level Zero, or no libpti_view can be found for it"
            )
        self._refuse_others()
        checks = PtiChecks.of_process()
        checks.look()
        version = checks.version(path)
        if ".".join(version.split(".")[:2]) not in KNOWN:
            raise SourceError("PTI_UNKNOWN_VERSION", _unknown_version(version, path))
        if version_pair(version) < _SAFE_FROM:
            raise SourceError("PTI_UNSAFE", _unsafe_version(version, path))
        checks.core(path)
        _note_use()
        metadata: Dict[str, Any] = {"pti_version": version}
        return kit_session.prepare(VENDOR, path, request, yields=True, metadata=metadata, session=XpuSession)

    def _refuse_others(self) -> None:
        """Raises SourceError if PTI is used by somebody who cannot give way, or was used before a fork."""
        if not libpti.has_core(self._maps):
            return
        if libpti.is_forked(self._stat) and not _used_here():
            raise SourceError("PTI_FORKED", _FORKED)
        if not libpti.has_torch(self._maps) and not _used_by_an_agent():
            raise SourceError("PTI_BUSY", _BUSY)


def _note_use() -> None:
    sys.__dict__[_MARKER] = os.getpid()


def _used_here() -> bool:
    return bool(sys.__dict__.get(_MARKER) == os.getpid())


def _used_by_an_agent() -> bool:
    return _MARKER in sys.__dict__


def _unknown_version(version: str, path: str) -> str:
    return (
        "%s is PTI version %s, whose record layouts this agent does not know, so it is not used. "
        "Known versions: %s. Update kineto-agent and kinetod, or install a known version of intel-pti"
        % (path, version, ", ".join(known for known in KNOWN if version_pair(known) >= _SAFE_FROM))
    )


def _unsafe_version(version: str, path: str) -> str:
    return (
        "PTI was not used: %s is PTI version %s, and versions before %s corrupt the memory of programs that launch "
        "work from more than one thread; install a newer intel-pti, and start the program again"
        % (path, version, ".".join(map(str, _SAFE_FROM)))
    )
