"""Measures the host and the GPUs every interval, as Dynolog's loops do, in threads of their own.

Theory of operation
    Each sampler has a `step`, which reads once, compares with the previous reading and writes lines; `Every` calls it.
    After a failed reading the next one begins anew: a difference over a gap would not cover one interval.
"""

import errno
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from kinetod.base.errors import StartError
from kinetod.config.metrics_settings import JSON_LOG_OWN
from kinetod.gpus.gpu_owners import GpuContainer, Jobs, Owners, Said, agreed, jobs_of
from kinetod.gpus.gpu_types import GpuState, Snapshot, between
from kinetod.processes import credentials, process_info
from kinetod.processes.credentials import PROC
from kinetod.processes.process_info import user_name
from kinetod.telemetry.dynolog_page import HostCounters, Value, host_values, read_counters

GPU_DEADLINE_S = 5.0  # nothing waits for it
STOP_S = 1.0
_NVIDIA_DEVICE = "nvidia"
MHZ = 10**6
# DCGM's profiling fields under the names of dynolog/src/gpumon/DcgmGroupInfo.cpp: shares are 0 to 1 there, too.
_SHARES = {
    "graphics_engine_active_ratio": "graphics_active",
    "sm_active_ratio": "sm_active",
    "sm_occupancy": "sm_occupancy",
    "tensorcore_active": "tensor_active",
    "hbm_mem_bw_util": "dram_active",
    "fp64_active": "fp64_active",
    "fp32_active": "fp32_active",
    "fp16_active": "fp16_active",
}
log = logging.getLogger(__name__)
lines = logging.getLogger("kinetod.metrics")

MAX_BYTES = 64 << 20  # a GPU takes 400 bytes, a host with 20 interfaces 4 KiB: two weeks for a host with 8 GPUs
_MODE = 0o640  # it contains users' names and jobs


# Writes metrics in the format of Dynolog's JSON logger, to a file or to the daemon's log.
#
# A line is `time = 2026-11-27T03:26:39.123Z data = {"cpu_i":"81.250","uptime":5120}`: Dynolog's without the prefix of
# its log library. Keys are in alphabetical order, fractions are texts with three places, as there. Its time is local
# and says UTC; here it is UTC.
# The file is opened for each line, so it may be moved or deleted at any time, and never through a link. At half of
# MAX_BYTES it becomes FILE.1, whose content is dropped. Where it cannot be renamed (the folder belongs to somebody
# else, or only the file is mounted there), it is truncated instead: new lines matter more than two-week-old ones. The
# log says so the first time.
# Lines are written one at a time, or two threads would both rename, and whole or not at all; a line truncated by a
# crash of the host is terminated at the next start. Lost lines are counted and logged, once when the loss begins and
# once when it ends.
def json_line(time_ns: int, values: Mapping[str, Value]) -> str:
    """One line, without its end. time_ns: Unix."""
    when = datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    shown = {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in values.items()}
    data = json.dumps(shown, sort_keys=True, separators=(",", ":"))
    return f"time = {when}.{time_ns // 10**6 % 1000:03d}Z data = {data}"


class JsonLog:
    """Writes the lines. Thread-safe.

    where: a value of metrics.json_log that is not empty. Raises StartError if the file cannot be written.
    """

    def __init__(self, where: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = None if where == JSON_LOG_OWN else Path(where)
        self._max_bytes = max_bytes
        self._lost = 0
        self._emptied = ""
        self._failure = ""
        self._lock = threading.Lock()
        if self._path is None:
            lines.setLevel(logging.INFO)  # whatever the level of other loggers
            return
        try:
            file = _opened(self._path)
            try:
                _end_line(self._path, file)
            finally:
                os.close(file)
        except OSError as exc:
            raise StartError(
                f"metrics.json_log: {self._path} cannot be written: {exc.strerror}; name a file in a folder that this "
                f"user (uid {os.geteuid()}) and its service may write to"
            ) from exc

    @property
    def problem(self) -> str:
        """Which lines are being lost, and why; empty if none are."""
        return self._failure or self._emptied

    def write(self, time_ns: int, values: Mapping[str, Value]) -> None:
        """Writes one line. May block on the disk. Raises nothing."""
        line = json_line(time_ns, values)
        if self._path is None:
            lines.info("%s", line)
            return
        with self._lock:
            self._write(self._path, line.encode() + b"\n")

    def _write(self, path: Path, data: bytes) -> None:
        try:
            self._append(path, data)
        except OSError as exc:
            self._lost += 1
            self._failure = f"{path} cannot be written: {exc.strerror}"
            if self._lost == 1:
                log.error("metrics.json_log: %s", self._failure)
        else:
            if self._lost:
                log.warning("metrics.json_log: %s can be written again; %d lines are missing", path, self._lost)
            self._lost, self._failure = 0, ""

    def _append(self, path: Path, data: bytes) -> None:
        file = _opened(path)
        try:
            size = os.fstat(file).st_size
            if size and size + len(data) > self._max_bytes // 2:
                if self._set_aside(path):
                    fresh = _opened(path)
                    os.close(file)
                    file = fresh
                else:
                    os.ftruncate(file, 0)
                size = 0
            if os.write(file, data) != len(data):
                os.ftruncate(file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def _set_aside(self, path: Path) -> bool:
        """Renames a full file; returns whether that is possible there."""
        try:
            path.replace(path.with_name(f"{path.name}.1"))
        except OSError as exc:
            emptied = f"{path} is full and cannot be renamed: {exc.strerror}; it is emptied instead"
            if not self._emptied:
                log.warning("metrics.json_log: %s, now and whenever it reaches %d MiB", emptied, self._max_bytes >> 21)
            self._emptied = emptied
            return False
        self._emptied = ""
        return True


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, _MODE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def _end_line(path: Path, file: int) -> None:
    """Terminates a line truncated by a crash, if there is one. Raises OSError."""
    size = os.fstat(file).st_size
    try:
        content = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:  # it is write-only
        return
    try:
        cut = size > 0 and os.pread(content, 1, size - 1) != b"\n"
    finally:
        os.close(content)
    if cut:
        os.write(file, b"\n")


class HostSampler:
    """Keeps the host's latest values. json_log: where each step writes a line, or None."""

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
        """The values of the last interval; none once they are older than two intervals."""
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

    read: returns a snapshot within the given seconds; owners, jobs: see GpuCollector; slurm: reads the Slurm variables
    of a snapshot's processes.
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


# A GPU's values as Dynolog reports them, as far as the vendor's library has them, without DCGM.
#
# Missing values are left out. Rates and shares cover the interval, as DCGM's do, from the same counters on NVIDIA's
# GPUs from Hopper on. Without these, PCIe rates are those measured by the driver for 20 ms.
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUser:
    """The user of a GPU. Empty: nobody, several, or unknown."""

    job_id: str = ""
    username: str = ""
    slurm_account: str = ""
    slurm_partition: str = ""
    pod_namespace: str = ""
    pod_name: str = ""
    container_name: str = ""


def gpu_values(gpu: GpuState, before: GpuState | None, seconds: float, user: GpuUser) -> dict[str, Value]:
    """The values under Dynolog's names: power and shares as float, texts as str, everything else as int.

    before: the same GPU at the beginning of the interval of `seconds`, or None.
    """
    sent = _rate(gpu.nvlink_transmit_bytes, before.nvlink_transmit_bytes if before else None, seconds)
    received = _rate(gpu.nvlink_receive_bytes, before.nvlink_receive_bytes if before else None, seconds)
    active = between(before.activity if before else None, gpu.activity)
    known: dict[str, Value | None] = {
        **{name: active.get(unit) for name, unit in _SHARES.items()},
        "gpu_frequency_mhz": _rounded(gpu.sm_clock_hertz, 1 / MHZ),
        "gpu_device_utilization": _rounded(gpu.utilization, 100),
        "gpu_memory_utilization": _rounded(gpu.memory_utilization, 100),
        "gpu_power_draw": gpu.power_watts,
        "pcie_tx_bytes": _rounded(active.get("pcie_transmit", gpu.pcie_transmit_bytes_per_second)),
        "pcie_rx_bytes": _rounded(active.get("pcie_receive", gpu.pcie_receive_bytes_per_second)),
        "nvlink_tx_bytes": _rounded(active.get("nvlink_transmit", sent)),
        "nvlink_rx_bytes": _rounded(active.get("nvlink_receive", received)),
        "minor_id": _minor(gpu.device),
        "gpu_name": gpu.name or None,
        "gpu_uuid": gpu.uuid or None,
        "job_id": user.job_id or None,
        "username": user.username or None,
        "slurm_account": user.slurm_account or None,
        "slurm_partition": user.slurm_partition or None,
        "pod_namespace": user.pod_namespace or None,
        "pod_name": user.pod_name or None,
        "container_name": user.container_name or None,
        "device": gpu.index,
    }
    return {name: value for name, value in known.items() if value is not None}


def gpu_user(
    gpu: GpuState,
    owners: Sequence[GpuContainer],
    jobs: Sequence[str],
    proc: Path = PROC,
    *,
    said: Said = MappingProxyType({}),
) -> GpuUser:
    """The user of the GPU according to the cluster, otherwise to the kernel, if its processes agree. Blocks.

    owners: the containers on it; jobs: those that the batch system allocated it to; said: the Slurm variables of its
    processes, which the kernel does not know.
    """
    slurm = agreed(gpu.processes, said)
    owner = owners[0] if len(owners) == 1 else GpuContainer()
    job_id, uids = "", set[int]()
    if len(jobs) == 1:
        job_id = jobs[0]
    elif not jobs:
        of_processes = {job.id if (job := process_info.job_of(each.pid, proc)) else "" for each in gpu.processes}
        job_id = of_processes.pop() if len(of_processes) == 1 else ""
    for process in gpu.processes:
        try:
            uids.add(credentials.read(process.pid, proc=proc).uid)
        except OSError:  # it has ended
            continue
    return GpuUser(
        job_id=job_id,
        username=user_name(uids.pop()) if len(uids) == 1 else "",
        slurm_account=slurm.account,
        slurm_partition=slurm.partition,
        pod_namespace=owner.namespace,
        pod_name=owner.pod,
        container_name=owner.container,
    )


def _rounded(value: float | None, factor: float = 1) -> int | None:
    return None if value is None else round(value * factor)


def _rate(now: int | None, before: int | None, seconds: float) -> float | None:
    """Bytes per second between two counters; None if one is missing, or it was reset."""
    if now is None or before is None or now < before or seconds <= 0:
        return None
    return (now - before) / seconds


def _minor(device: str) -> int | None:
    number = device.removeprefix(_NVIDIA_DEVICE)
    return int(number) if number != device and number.isdecimal() else None
