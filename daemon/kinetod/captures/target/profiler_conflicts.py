"""Explains what the daemon sees of conflicts that kept CUPTI from recording: other profilers, a GPU without memory."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kineto_trace.base.quantities import format_size

from kinetod.captures.result.verdict import Ending
from kinetod.gpus.gpu_types import Snapshot
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.check_runner import HostLooker
from kinetod.processes.profiler_signs import BY_PRODUCT, Holds
from kinetod.profilers import ProfilingTool, Scan, named

CUPTI_BUSY = "CUPTI_BUSY"
CUPTI_NOT_INITIALIZED = "CUPTI_NOT_INITIALIZED"
DEADLINE_S = 15.0  # the verdict waits for it; 0.4 s are usual, and 5 were not enough beside a load of 14
ENOUGH_BYTES = 64 << 20  # four times what CUPTI was seen to need
NOT_THE_CAUSE = ", so memory is not the cause; if the program has another profiler, trace once that has ended"
PROC = Path("/proc")


class Conflicts:
    """Adds conflicts to the reason of an ending. store: the store's folder. gpus: returns the GPUs now; may block."""

    def __init__(
        self,
        store: Path,
        *,
        looker: HostLooker | None = None,
        proc: Path = PROC,
        gpus: Callable[[], Snapshot] = Snapshot,
    ) -> None:
        self._question = CheckQuestion(
            daemon_pid=os.getpid(), store=str(store), needed_bytes=0, helper=False, only_profilers=True
        )
        self._looker = looker or HostLooker(deadline_s=DEADLINE_S)
        self._proc = proc
        self._gpus = gpus

    async def explained(self, ending: Ending, uid: int, pid: int = 0) -> Ending:
        """Returns the ending with the conflicts added. uid: the target's user, who is shown only their own pids."""
        if ending.code == CUPTI_NOT_INITIALIZED:
            return replace(ending, reason=ending.reason + free_memory(await asyncio.to_thread(self._gpus), pid))
        if ending.code != CUPTI_BUSY:
            return ending
        looked = await self._looker.look(self._question)
        if looked.scan is None:
            return ending
        return replace(ending, reason=ending.reason + listed(looked.scan, lambda each: self._owner(each.pid) == uid))

    def _owner(self, pid: int) -> int | None:
        with contextlib.suppress(OSError):
            return (self._proc / str(pid)).stat().st_uid
        return None


def free_memory(found: Snapshot, pid: int) -> str:
    """Text to append to a reason: the free memory of the process's GPUs, and whether it is the cause; "" if it is
    unknown.
    """
    free = {
        gpu.index: max(gpu.memory_total_bytes - gpu.memory_used_bytes, 0)
        for gpu in found.gpus
        if gpu.memory_total_bytes is not None
        and gpu.memory_used_bytes is not None
        and pid in (process.pid for process in gpu.processes)
    }
    if not free:
        return ""
    text = "; " + ", ".join(f"GPU {index} has {format_size(left)} free" for index, left in free.items())
    return text if min(free.values()) < ENOUGH_BYTES else text + NOT_THE_CAUSE


def listed(found: Scan, visible: Callable[[ProfilingTool], bool]) -> str:
    """Text to append to a reason; "" if there are none. Profilers that hold only hardware counters cannot conflict."""
    tools: dict[str, list[ProfilingTool]] = {}
    for each in found.profilers:
        if BY_PRODUCT[each.product].holds is not Holds.COUNTERS:
            tools.setdefault(each.product, []).append(each)
    if not tools:
        return ""
    parts = [f"{product} ({named(profilers, visible)})" for product, profilers in tools.items()]
    return f"; other profilers on this host: {', '.join(parts)}"
