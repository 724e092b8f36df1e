"""Samples this host with psutil, and shows it to Prometheus. Blocks; call it in a thread."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kinetod.supervise.thread_deadline import WithinDeadline

# Interfaces of containers and bridges: there may be hundreds, and their traffic also passes a real one.
_VIRTUAL = re.compile(r"lo|(veth|docker|br-|virbr|cali|cilium|lxc|flannel|cni|kube-|nodelocaldns|dummy|tap|tun|ifb).*")
_NO_DISK = re.compile(r"(loop|ram|zram|sr|fd|nbd)\d+")
_PARTITION = re.compile(r"((nvme\d+n\d+|mmcblk\d+|md\d+)p\d+)|((sd|vd|hd|xvd)[a-z]+\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Counters of one whole disk."""

    read_bytes: int
    written_bytes: int
    reads: int
    writes: int
    busy_seconds: float  # 0 if the kernel does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """Counters of one network interface."""

    received_bytes: int
    sent_bytes: int
    received_packets: int
    sent_packets: int
    receive_errors: int
    send_errors: int
    receive_drops: int
    send_drops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Counters and states at one moment. Counters only grow until the next boot."""

    time_ns: int  # Unix
    cpus: int
    cpu_seconds: dict[str, float]  # mode -> seconds of all CPUs; user and nice exclude guests
    load: tuple[float, float, float]  # over 1, 5 and 15 minutes
    memory_total_bytes: int
    memory_available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    boot_time_seconds: float  # Unix
    disks: dict[str, Disk] = field(default_factory=dict)
    interfaces: dict[str, Interface] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Size and free space, in bytes, of the disk that holds a folder."""

    total_bytes: int
    free_bytes: int  # what an unprivileged process can still write


def sample_host() -> HostReading:
    """Takes a fresh sample."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return HostReading(
        time_ns=time.time_ns(),
        cpus=psutil.cpu_count() or 1,
        cpu_seconds=_cpu_seconds(),
        load=os.getloadavg(),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        swap_total_bytes=swap.total,
        swap_used_bytes=swap.used,
        boot_time_seconds=psutil.boot_time(),
        disks=_disks(),
        interfaces=_interfaces(),
    )


def _cpu_seconds() -> dict[str, float]:
    seconds: dict[str, float] = dict(psutil.cpu_times()._asdict())
    # The kernel counts guests in user and nice as well.
    for mode, guest in (("user", "guest"), ("nice", "guest_nice")):
        if guest in seconds:
            seconds[mode] = max(0.0, seconds[mode] - seconds[guest])
    return seconds


def _disks() -> dict[str, Disk]:
    found: dict[str, Disk] = {}
    with contextlib.suppress(OSError, RuntimeError):  # a kernel without /proc/diskstats
        for name, counters in (psutil.disk_io_counters(perdisk=True) or {}).items():
            if not _NO_DISK.fullmatch(name) and not _PARTITION.fullmatch(name):
                found[name] = Disk(
                    read_bytes=counters.read_bytes,
                    written_bytes=counters.write_bytes,
                    reads=counters.read_count,
                    writes=counters.write_count,
                    busy_seconds=getattr(counters, "busy_time", 0) / 1000,
                )
    return found


def _interfaces() -> dict[str, Interface]:
    return {
        os.fsencode(name).decode(errors="backslashreplace"): Interface(  # names may contain any byte
            received_bytes=counters.bytes_recv,
            sent_bytes=counters.bytes_sent,
            received_packets=counters.packets_recv,
            sent_packets=counters.packets_sent,
            receive_errors=counters.errin,
            send_errors=counters.errout,
            receive_drops=counters.dropin,
            send_drops=counters.dropout,
        )
        for name, counters in psutil.net_io_counters(pernic=True).items()
        if not _VIRTUAL.fullmatch(name)
    }


def space_of(folder: Path) -> Space:
    """The space of the disk that holds a folder. Raises OSError."""
    status = os.statvfs(folder)
    return Space(total_bytes=status.f_blocks * status.f_frsize, free_bytes=status.f_bavail * status.f_frsize)


def cpu_shares(before: HostReading, after: HostReading) -> tuple[float, float]:
    """Fractions of CPU time, 0 to 1, spent busy and waiting for disks between two samples."""
    spent = {mode: max(0.0, seconds - before.cpu_seconds.get(mode, 0.0)) for mode, seconds in after.cpu_seconds.items()}
    total = sum(spent.values())
    if total <= 0:
        return 0.0, 0.0
    waited = spent.get("iowait", 0.0)
    return min(1.0, (total - spent.get("idle", 0.0) - waited) / total), min(1.0, waited / total)


log = logging.getLogger(__name__)
T = TypeVar("T")

DEADLINE_S = 0.4  # each; a scrape may take 2 s at most, of which the GPUs get 1.2
_LOAD = ("1m", "5m", "15m")

# Name, help, and field of a disk or an interface; a counter's name gets _total when it is written.
_DISK: Sequence[tuple[str, str, str]] = (
    ("kineto_host_disk_read_bytes", "Bytes read from a disk.", "read_bytes"),
    ("kineto_host_disk_written_bytes", "Bytes written to a disk.", "written_bytes"),
    ("kineto_host_disk_reads", "Completed reads from a disk.", "reads"),
    ("kineto_host_disk_writes", "Completed writes to a disk.", "writes"),
    ("kineto_host_disk_busy_seconds", "Time in which a disk was busy.", "busy_seconds"),
)
_NETWORK: Sequence[tuple[str, str, str]] = (
    ("kineto_host_network_receive_bytes", "Bytes received by an interface.", "received_bytes"),
    ("kineto_host_network_transmit_bytes", "Bytes sent by an interface.", "sent_bytes"),
    ("kineto_host_network_receive_packets", "Packets received by an interface.", "received_packets"),
    ("kineto_host_network_transmit_packets", "Packets sent by an interface.", "sent_packets"),
    ("kineto_host_network_receive_errors", "Packets received with errors.", "receive_errors"),
    ("kineto_host_network_transmit_errors", "Packets that could not be sent.", "send_errors"),
    ("kineto_host_network_receive_drops", "Packets received and dropped.", "receive_drops"),
    ("kineto_host_network_transmit_drops", "Packets dropped before they were sent.", "send_drops"),
)


class HostCollector(Collector):
    """Host metrics from psutil, and the space on the store's disk."""

    def __init__(self, state_dir: Path) -> None:
        self._host = WithinDeadline("host metrics", sample_host)
        self._space = WithinDeadline("store space", lambda: space_of(state_dir))

    def describe(self) -> Iterable[Metric]:
        """Every family, without values."""
        return [*_families(None), *_space(None), _up({})]

    def collect(self) -> Iterable[Metric]:
        """Every family that could be read in time, and one that shows which could not."""
        up: dict[str, tuple[bool, float]] = {}
        host = _measured("host", "the host", self._host, up, who="psutil")
        space = _measured("store", "the store's disk", self._space, up)
        yield from _families(host) if host is not None else ()
        yield from _space(space) if space is not None else ()
        yield _up(up)


def _measured(
    name: str, what: str, part: WithinDeadline[T], up: dict[str, tuple[bool, float]], who: str = "it"
) -> T | None:
    """The measurement of a part of the host, or None; success and duration are noted in `up`."""
    began = time.perf_counter()
    found: T | None = None
    try:
        found = part.get(DEADLINE_S)
    except (TimeoutError, OSError, RuntimeError, psutil.Error) as exc:
        log.warning("%s cannot be measured: %s", what, str(exc) or f"{who} did not answer in time")
    up[name] = (found is not None, time.perf_counter() - began)
    return found


def _up(parts: Mapping[str, tuple[bool, float]]) -> Metric:
    family = GaugeMetricFamily(
        "kineto_collector_up", "Whether this part of the host could be measured in time.", labels=["collector"]
    )
    for name, (up, _seconds) in parts.items():
        family.add_metric([name], up)
    return family


def _families(host: HostReading | None) -> Iterable[Metric]:
    cpu = CounterMetricFamily("kineto_host_cpu_seconds", "CPU time of all CPUs, by mode.", labels=["mode"])
    load = GaugeMetricFamily(
        "kineto_host_load_average", "Average number of processes that were running or runnable.", labels=["window"]
    )
    if host is not None:
        for mode, seconds in host.cpu_seconds.items():
            cpu.add_metric([mode], seconds)
        for window, average in zip(_LOAD, host.load, strict=True):
            load.add_metric([window], average)
    yield cpu
    yield load
    for name, text, attribute in (
        ("kineto_host_cpus", "Logical CPUs.", "cpus"),
        ("kineto_host_memory_total_bytes", "Total memory of the host.", "memory_total_bytes"),
        ("kineto_host_memory_available_bytes", "Memory available without swapping.", "memory_available_bytes"),
        ("kineto_host_swap_total_bytes", "Swap space.", "swap_total_bytes"),
        ("kineto_host_swap_used_bytes", "Swap space in use.", "swap_used_bytes"),
        ("kineto_host_boot_time_seconds", "Unix time at which the host booted.", "boot_time_seconds"),
    ):
        yield GaugeMetricFamily(name, text, value=None if host is None else getattr(host, attribute))
    yield from _counters(_DISK, host.disks if host is not None else {})
    yield from _counters(_NETWORK, host.interfaces if host is not None else {})


def _counters(table: Sequence[tuple[str, str, str]], devices: Mapping[str, Any]) -> Iterable[Metric]:
    for name, text, attribute in table:
        family = CounterMetricFamily(name, text, labels=["device"])
        for device, counters in devices.items():
            family.add_metric([device], getattr(counters, attribute))
        yield family


def _space(space: Space | None) -> Iterable[Metric]:
    for name, text, attribute in (
        ("kineto_store_size_bytes", "Size of the disk of the store.", "total_bytes"),
        ("kineto_store_free_bytes", "Space left on the disk of the store.", "free_bytes"),
    ):
        yield GaugeMetricFamily(name, text, value=None if space is None else getattr(space, attribute))
