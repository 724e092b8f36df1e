"""The host as Prometheus metrics, read when somebody scrapes: CPU, memory, disks, network, the store's disk."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kinetod.supervise.thread_deadline import WithinDeadline
from kinetod.telemetry.host_sample import HostReading, Space, sample_host, space_of

log = logging.getLogger(__name__)

DEADLINE_S = 0.4  # each; a scrape may take 2 s at most, of which the GPUs get 1.2
_LOAD = ("1m", "5m", "15m")

# Name, help, and what of a disk or an interface; the name of a counter gets its _total when it is written.
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
        """Every family that could be read in time, and which could not."""
        up: dict[str, tuple[bool, float]] = {}
        began = time.perf_counter()
        host: HostReading | None = None
        try:
            host = self._host.get(DEADLINE_S)
        except (TimeoutError, OSError, RuntimeError, psutil.Error) as exc:
            log.warning("the host cannot be measured: %s", str(exc) or "psutil did not answer in time")
        up["host"] = (host is not None, time.perf_counter() - began)
        began = time.perf_counter()
        space: Space | None = None
        try:
            space = self._space.get(DEADLINE_S)
        except (TimeoutError, OSError) as exc:
            log.warning("the store's disk cannot be measured: %s", str(exc) or "it did not answer in time")
        up["store"] = (space is not None, time.perf_counter() - began)
        yield from _families(host) if host is not None else ()
        yield from _space(space) if space is not None else ()
        yield _up(up)


def _up(parts: Mapping[str, tuple[bool, float]]) -> Metric:
    family = GaugeMetricFamily(
        "kineto_collector_up", "Whether this part of the host could be measured in time.", labels=["collector"]
    )
    for name, (up, _seconds) in parts.items():
        family.add_metric([name], up)
    return family


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _families(host: HostReading | None) -> Iterable[Metric]:
    cpu = CounterMetricFamily("kineto_host_cpu_seconds", "Time of all CPUs, by mode.", labels=["mode"])
    load = GaugeMetricFamily("kineto_host_load_average", "Processes that were running or runnable.", labels=["window"])
    if host is not None:
        for mode, seconds in host.cpu_seconds.items():
            cpu.add_metric([mode], seconds)
        for window, average in zip(_LOAD, host.load, strict=True):
            load.add_metric([window], average)
    yield cpu
    yield load
    for name, text, attribute in (
        ("kineto_host_cpus", "Logical CPUs.", "cpus"),
        ("kineto_host_memory_total_bytes", "Memory of the host.", "memory_total_bytes"),
        ("kineto_host_memory_available_bytes", "Memory available without swapping.", "memory_available_bytes"),
        ("kineto_host_swap_total_bytes", "Swap space.", "swap_total_bytes"),
        ("kineto_host_swap_used_bytes", "Swap space in use.", "swap_used_bytes"),
        ("kineto_host_boot_time_seconds", "Unix time of the boot.", "boot_time_seconds"),
    ):
        yield _gauge(name, text, None if host is None else getattr(host, attribute))
    yield from _counters(_DISK, host.disks if host is not None else {})
    yield from _counters(_NETWORK, host.interfaces if host is not None else {})


def _counters(table: Sequence[tuple[str, str, str]], devices: Mapping[str, Any]) -> Iterable[Metric]:
    for name, text, attribute in table:
        family = CounterMetricFamily(name, text, labels=["device"])
        for device, counters in devices.items():
            family.add_metric([device], getattr(counters, attribute))
        yield family


def _space(space: Space | None) -> Iterable[Metric]:
    yield _gauge("kineto_store_size_bytes", "The disk of the store.", None if space is None else space.total_bytes)
    yield _gauge(
        "kineto_store_free_bytes", "Space left on the disk of the store.", None if space is None else space.free_bytes
    )
