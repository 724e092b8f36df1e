"""Whether rocprofiler-sdk can record in this process now. Pure: facts in, an error out.

Theory of operation
    rocprofiler takes a client's wishes only while it is being configured, and sees the runtimes (HIP, HSA) that
    register with it. What a client that comes late can do depends on the version:

        from 1.3.2 on    anybody may be configured at any time
        1.3.0, 1.3.1     only if nobody has been configured; runtimes that have registered are replayed
        below 1.3.0      only if nobody has been configured, and before HIP has initialised: else nothing would be
                         recorded, and nothing would say so

    Where torch is built for ROCm, its own profiler (Kineto) is configured when HIP initialises.

    1.3.2 to 1.3.4 may hang a program whose kernels they record (rocm-systems 7796 and 7924, vllm 54087), unless they
    leave its queues alone, which they do if a variable says so when the process starts. They see queues made before
    then no more than 1.3.0's predecessors do.

    In a process that was started by `kinetoctl run` all versions work: our client is configured with the others.
"""

from typing import Any, Mapping, Optional

from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.rocprofiler.known_versions import RELEASES, text_of

ANYTIME, LATE_START = 10302, 10300
_HANGS = range(10302, 10305)
INTERPOSITION = "ROCPROFILER_QUEUE_INTERPOSITION"

_RUN = "start the program with `kinetoctl run -- …`, which sets ROCP_TOOL_LIBRARIES, and any version can record it"
_LOCKED = (
    "rocprofiler-sdk %s has been configured in this process already (by torch's profiler, JAX or another tool), and "
    "takes no more clients; 1.3.2 and later do. Record with torch's profiler in the program, or " + _RUN
)
_TOO_LATE = (
    "HIP has initialised in this process already, and rocprofiler-sdk %s would record nothing of it; 1.3.0 and later "
    "do. For this version, " + _RUN
)
_HANG = (
    "rocprofiler-sdk %s can hang a program whose kernels it records (fixed in 1.3.5). Use ROCm 10, or set "
    + INTERPOSITION
    + "=0 and "
    + _RUN
)
_OVER = "rocprofiler-sdk has been shut down in this process by another of its users, which cannot be undone"
_BEGINNING = "rocprofiler-sdk is being configured in this process at this moment: try again"
_UNKNOWN = (
    "%s is rocprofiler-sdk %s, whose records this agent does not know, so it does not record with it. Known: %s. "
    "Update kineto-agent and kinetod, or use such a ROCm"
)


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
