"""Sends the modules that XLA has compiled for a GPU to the daemon, at the end of a recording of its kernels.

Theory of operation
    CUPTI's kernel records do not mention HLO. But XLA names a kernel after its instruction and launches the
    instructions of a module in the order of its schedule, and both are in the module, which the executable keeps: so
    the daemon can find the instruction of each kernel (structure/hlo_kernels.py). Nothing is recorded in the program;
    when everything else has stopped, the modules of all live executables go through an arena of their own.

    Reading a module takes 0.1 ms per KB of it, without the GIL, and serialising it 15 us per KB, with the GIL (measured
    with JAX 0.11.2 on an H200; a training step of 24 layers has 2 MB: 216 and 30 ms). A module's size shows only in the
    time that reading took: a module that took longer than LONGEST_READ_S is left out, and the outcome says so.
"""

import time
from typing import Any, Dict, Iterator, List, Optional

from kineto_agent.protocol.records import HLO_MODULES_FORMAT, PART_HEAD
from kineto_agent.sources.file_arena import BUFFER_BYTES, FileArena
from kineto_agent.sources.interface import SourceCounts, SourceOutcome
from kineto_agent.sources.jax import jax_runtime
from kineto_agent.system.debuglog import log_exception

NAME = "hlo_modules"
LONGEST_READ_S = 0.7  # then serialising takes 100 ms with the GIL
TOTAL_S = 3.0
MOST_BYTES = 64 << 20
_PAUSE_S = 0.002  # between two modules, so that the program gets the GIL
_GPUS = ("cuda", "rocm", "gpu")


class HloModulesSession:
    """A SourceSession that is not selected by activity type."""

    format = HLO_MODULES_FORMAT
    yields = False

    def __init__(self, buffer_limit_bytes: int) -> None:
        """Create the arena. Raises SourceError."""
        self.metadata: Dict[str, Any] = {"jax_version": jax_runtime.version()}
        self._arena = FileArena(NAME, min(MOST_BYTES, max(buffer_limit_bytes, BUFFER_BYTES)))
        self.arena_fd = self._arena.fd
        self._left_out: List[str] = []
        self._count = 0

    def start(self) -> None:
        """Write the modules. Never raises."""
        deadline = time.monotonic() + TOTAL_S
        for executable in _executables():
            if time.monotonic() > deadline or self._arena.written_bytes > MOST_BYTES:
                self._left_out.append("all others: too many")
                break
            try:
                self._add(executable)
            except Exception:  # noqa: BLE001 - one that is being freed, or not of this client
                log_exception("the modules of an executable cannot be read")
                self._left_out.append("one could not be read")

    def _add(self, executable: Any) -> None:
        begin = time.monotonic()
        modules = executable.hlo_modules()
        read_s = time.monotonic() - begin
        if read_s > LONGEST_READ_S:
            self._left_out.append("%s: too large" % ", ".join(str(module.name) for module in modules))
            return
        for module in modules:
            data = module.as_serialized_hlo_module_proto()
            self._arena.copy_from(PART_HEAD.pack(len(data)))
            self._arena.copy_from(data)
            self._count += 1
            time.sleep(_PAUSE_S)

    def counts(self) -> SourceCounts:
        """Counts of the written modules."""
        return self._arena.counts()

    def stop(self) -> SourceOutcome:
        """Publish the rest."""
        self._arena.finish()
        warnings = []
        if self._left_out:
            text = "some XLA modules were not recorded, so the HLO of their kernels is unknown: "
            warnings.append(text + "; ".join(self._left_out))
        return SourceOutcome(self.counts(), {"modules": self._count}, warnings, detach_ns=0, cpu_ns=0)

    def give_way(self) -> None:
        """Do nothing: this session uses no profiler."""

    def close(self) -> None:
        """Free the arena."""
        self._arena.close()


def _executables() -> Iterator[Any]:
    for client in jax_runtime.clients():
        if getattr(client, "platform", "") in _GPUS and hasattr(client, "live_executables"):
            yield from client.live_executables()


def session(buffer_limit_bytes: int) -> Optional[HloModulesSession]:
    """Return a session for all modules known now; None without JAX on a GPU. Raises SourceError."""
    if not any(getattr(client, "platform", "") in _GPUS for client in jax_runtime.clients()):
        return None
    return HloModulesSession(buffer_limit_bytes)
