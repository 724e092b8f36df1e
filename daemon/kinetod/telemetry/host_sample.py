"""Samples this host with psutil. Blocks; call it in a thread."""

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Interfaces of containers and bridges: there may be hundreds, and their traffic passes a real one as well.
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
    busy_seconds: float  # 0 where the kernel does not count


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
    cpu_seconds: dict[str, float]  # mode -> seconds of all CPUs; user and nice without those of guests
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
        os.fsencode(name).decode(errors="backslashreplace"): Interface(  # any byte may be in a name
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
