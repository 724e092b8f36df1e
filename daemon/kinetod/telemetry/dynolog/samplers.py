"""Measures the host and the GPUs every interval, as Dynolog's loops do, in threads of their own.

Theory of operation
    Each sampler has a `step`, which reads once, compares with the reading before and writes lines; `Every` calls it. If
    a reading fails, the next one begins anew: a difference over a gap would not be one over the interval.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kinetod.gpus.container_owners import Owners
from kinetod.gpus.gpu_types import GpuState, Snapshot
from kinetod.gpus.job_owners import Jobs, jobs_of
from kinetod.gpus.slurm_variables import Said
from kinetod.telemetry.dynolog.gpu_values import gpu_user, gpu_values
from kinetod.telemetry.dynolog.host_values import HostCounters, Value, host_values, read_counters
from kinetod.telemetry.dynolog.json_log import JsonLog

log = logging.getLogger(__name__)

GPU_DEADLINE_S = 5.0  # nobody waits for it
STOP_S = 1.0


class HostSampler:
    """The latest values of the host. json_log: where each step writes a line, or None."""

    def __init__(
        self,
        interval_s: float,
        *,
        prefixes: Sequence[str] = (),
        json_log: JsonLog | None = None,
        read: Callable[[], HostCounters] = read_counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = interval_s
        self._prefixes = prefixes
        self._json_log = json_log
        self._read = read
        self._clock = clock
        self._before: HostCounters | None = None
        self._values: tuple[float, Mapping[str, Value]] = (clock(), {})

    @property
    def values(self) -> Mapping[str, Value]:
        """Those of the last interval; none once they are older than two intervals."""
        read_at, values = self._values
        return values if self._clock() - read_at <= 2 * self._interval_s else {}

    def step(self) -> None:
        """Reads once. Blocks."""
        try:
            reading = self._read()
        except (OSError, ValueError) as exc:
            log.warning("the host cannot be measured for Dynolog's metrics: %s", exc)
            self._before, self._values = None, (self._clock(), {})
            return
        values = host_values(self._before, reading, self._prefixes)
        self._before, self._values = reading, (self._clock(), values)
        if self._json_log is not None:
            self._json_log.write(reading.time_ns, values)


class GpuSampler:
    """Writes a line for each GPU that answers.

    read: a snapshot, within the seconds that it is given; owners and jobs: as GpuCollector has them; slurm: what the
    processes of a snapshot say of their jobs.
    """

    def __init__(
        self,
        json_log: JsonLog,
        *,
        read: Callable[[float], Snapshot],
        owners: Callable[[Snapshot], Owners] = lambda _: {},
        jobs: Callable[[], Jobs] = dict,
        slurm: Callable[[Snapshot], Said] = lambda _: {},
    ) -> None:
        self._json_log = json_log
        self._read = read
        self._owners = owners
        self._jobs = jobs
        self._slurm = slurm
        self._before: tuple[int, Mapping[str, GpuState]] = (0, {})

    def step(self) -> None:
        """Reads once. Blocks."""
        snapshot = self._read(GPU_DEADLINE_S)
        before_ns, before = self._before
        seconds = (snapshot.monotonic_ns - before_ns) / 1e9
        self._before = snapshot.monotonic_ns, {gpu.uuid: gpu for gpu in snapshot.gpus}
        owners, jobs, said = self._owners(snapshot), self._jobs(), self._slurm(snapshot)
        for gpu in snapshot.gpus:
            if gpu.works:
                user = gpu_user(gpu, owners.get(gpu.uuid, ()), jobs_of(gpu, jobs), said=said)
                self._json_log.write(snapshot.time_ns, gpu_values(gpu, before.get(gpu.uuid), seconds, user))


class Every:
    """Calls `step` at once and then every interval, until `stop`. A late step is not made up for."""

    def __init__(self, name: str, interval_s: float, step: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._step = step
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; blocks for at most STOP_S, as a step may hang."""
        self._ended.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                self._step()
            except Exception:
                log.exception("a measurement for Dynolog's metrics failed; the next one is in %g s", self._interval_s)
            due = max(due + self._interval_s, time.monotonic())
            if self._ended.wait(max(0.0, due - time.monotonic())):
                return
