"""Dynolog's metrics on the page /metrics: those of its Prometheus logger, all of them gauges.

The values of the host are differences and percentages over an interval, from /proc. The labels are Dynolog's, too:
`host_name`, and `net` for an interface. No name collides with kinetod's, which all begin with `kineto_` or `process_`.

Theory of operation
    Dynolog's values are gauges over its last interval, while kinetod's own are counters, so the counters of the
    previous interval must be kept. `read_counters` reads them, `host_values` is a pure function of two readings.

    Dynolog's definitions differ from kinetod's, and are kept: guest time is part of user time, waiting for disks is
    busy time, percentages are 0 to 100, and every interface of the network namespace is listed, including loopback.
    Anything not read at both ends of an interval has no value: the first reading only has the uptime, and a new or
    reset interface waits for the next one. (Dynolog reports 0 for a new interface, and garbage for a reset one.) An
    interface is identified by the kernel's number: another one may have taken its name, with counters that happen to be
    higher.

    An interface's name may contain any byte but a blank, a slash and a colon; invalid UTF-8 is escaped.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PROC = Path("/proc")
# The first line of /proc/stat, and the letters of Dynolog's names. Guests are in user and nice already.
MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
_IN_TOTAL = MODES[:8]
MILLISECONDS = {
    "cpu_u_ms": "user",
    "cpu_s_ms": "system",
    "cpu_w_ms": "iowait",
    "cpu_n_ms": "nice",
    "cpu_x_ms": "irq",
    "cpu_y_ms": "softirq",
    "cpu_z_ms": "steal",
    "cpu_guest_ms": "guest",
    "cpu_guest_nice_ms": "guest_nice",
}
PERCENTAGES = {
    "cpu_u": "user",
    "cpu_s": "system",
    "cpu_i": "idle",
    "cpu_guest": "guest",
    "cpu_guest_nice": "guest_nice",
}
# Columns of /proc/net/dev after the name.
NETWORK = {
    "rx_bytes": 0,
    "rx_packets": 1,
    "rx_errors": 2,
    "rx_drops": 3,
    "tx_bytes": 8,
    "tx_packets": 9,
    "tx_errors": 10,
    "tx_drops": 11,
}
_TICKS_PER_SECOND = 100  # USER_HZ, the same on every present Linux architecture
_COLUMNS = 16
_SPELLED_OUT = "backslashreplace"
Value = int | float | str
HOST_LABEL, INTERFACE_LABEL = "host_name", "net"
_NO_PERF = (
    "kinetod does not read the CPUs' hardware counters: it would need CAP_PERFMON (or `kernel.perf_event_paranoid` 0) "
    "and a system call that its service may not make, and would take two counters of each CPU from profilers. "
    "node-exporter has them (`--collector.perf`); Dynolog shows 0 without `--enable_perf_monitor`"
)
_HOPPER = "on NVIDIA GPUs since Hopper, from the counters that DCGM reads there; not in MIG mode"
_NVLINK = "since Hopper including headers, as in DCGM; on older GPUs, and in kinetod's metric, only the payload"
_PCIE = "before Hopper: measured by the driver over 20 ms"
_ENVIRONMENT = "from the environment of the processes on the GPU, if all agree and kinetod can read it (as root)"
_MODES = {"u": "user", "s": "system", "n": "nice", "w": "iowait", "x": "irq", "y": "softirq", "z": "steal"}
_GUESTS = {"user": "guest", "nice": "guest_nice"}  # the kernel counts them in both


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCounters:
    """The kernel's counters since boot."""

    time_ns: int  # Unix
    uptime_s: int
    cpu_ticks: Mapping[str, int]  # by MODES, of all CPUs, in hundredths of a second
    interfaces: Mapping[str, tuple[int, ...]]  # by name, the columns of NETWORK in its order
    numbers: Mapping[str, int] = field(default_factory=dict)  # of interfaces, by name


def read_counters(
    proc: Path = PROC, numbered: Callable[[], Iterable[tuple[int, str]]] = socket.if_nameindex
) -> HostCounters:
    """Reads /proc. Blocks briefly. Raises OSError, and ValueError for an unexpected format.

    numbered: numbers and names of the interfaces.
    """
    first, *_ = (proc / "stat").read_text().splitlines()
    name, *ticks = first.split()
    if name != "cpu" or len(ticks) < len(_IN_TOTAL):
        raise ValueError(f"unexpected first line of {proc}/stat: {first!r:.80}")
    return HostCounters(
        time_ns=time.time_ns(),
        uptime_s=int(float((proc / "uptime").read_text().split()[0])),
        cpu_ticks=dict(zip(MODES, map(int, ticks), strict=False)),
        interfaces=_interfaces((proc / "net/dev").read_bytes().decode(errors=_SPELLED_OUT)),
        numbers={os.fsencode(name).decode(errors=_SPELLED_OUT): number for number, name in numbered()},
    )


def _interfaces(text: str) -> dict[str, tuple[int, ...]]:
    found = {}
    for line in text.removesuffix("\n").split("\n")[2:]:
        name, _, rest = line.rpartition(":")
        columns = rest.split()
        if len(columns) < _COLUMNS:
            raise ValueError(f"unexpected line of net/dev: {line!r:.80}")
        found[name.strip(" ")] = tuple(int(columns[place]) for place in NETWORK.values())
    return found


def host_values(before: HostCounters | None, after: HostCounters, prefixes: Sequence[str] = ()) -> dict[str, Value]:
    """The values under Dynolog's names: percentages 0 to 100 as float, everything else as int; `rx_bytes.eth0` for
    interfaces.

    before: the reading at the beginning of the interval, or None. prefixes: of the names of wanted interfaces; empty:
    all of them.
    """
    values: dict[str, Value] = {"uptime": after.uptime_s}
    if before is None:
        return values
    # The kernel may reduce idle and iowait ticks; a negative time would be nonsense.
    spent = {
        mode: max(0, ticks - before.cpu_ticks[mode])
        for mode, ticks in after.cpu_ticks.items()
        if mode in before.cpu_ticks
    }
    if total := sum(spent[mode] for mode in _IN_TOTAL):
        values["cpu_util"] = 100 * (1 - spent["idle"] / total)
        values |= {name: 100 * spent[mode] / total for name, mode in PERCENTAGES.items() if mode in spent}
        values |= {
            name: spent[mode] * 1000 // _TICKS_PER_SECOND for name, mode in MILLISECONDS.items() if mode in spent
        }
    for interface, counts in after.interfaces.items():
        old = before.interfaces.get(interface)
        if old is None or not _wanted(interface, prefixes) or any(a < b for a, b in zip(counts, old, strict=True)):
            continue
        if before.numbers.get(interface) != after.numbers.get(interface):
            continue
        values |= {f"{name}.{interface}": a - b for name, a, b in zip(NETWORK, counts, old, strict=True)}
    return values


def _wanted(interface: str, prefixes: Sequence[str]) -> bool:
    return not prefixes or interface.startswith(tuple(prefixes))


class DynologCollector(Collector):
    """values: returns the host's latest, in the form of `host_values`."""

    def __init__(self, values: Callable[[], Mapping[str, Value]], hostname: str) -> None:
        self._values = values
        self._hostname = hostname

    def describe(self) -> Iterable[Metric]:
        """Every family, without values."""
        return self._families({})

    def collect(self) -> Iterable[Metric]:
        """Every family, with the values of the last interval."""
        return self._families(self._values())

    def _families(self, values: Mapping[str, Value]) -> Iterable[Metric]:
        of_interfaces: dict[str, list[tuple[str, Value]]] = {}
        for key, value in values.items():
            name, _, interface = key.partition(".")
            of_interfaces.setdefault(name, []).append((interface, value))
        for metric in HOST_METRICS:
            if metric.served is not ServedIn.EVERYWHERE:
                continue
            labels = (HOST_LABEL, INTERFACE_LABEL) if metric.name in NETWORK else (HOST_LABEL,)
            family = GaugeMetricFamily(metric.name, metric.meaning, labels=labels)
            for interface, value in of_interfaces.get(metric.name, ()):
                family.add_metric([self._hostname, interface][: len(labels)], float(value))
            yield family


# Every metric of Dynolog, kinetod's counterpart, and whether it is served: the table of docs/metrics.md. The facts come
# from Dynolog's sources as of August 2026. Its Prometheus page has a fixed list of names, none for a GPU; its other
# loggers have all of them. A test compares the served metrics with this table.
class ServedIn(Enum):
    """Where a metric of Dynolog is available here; the value is the wording in the document."""

    EVERYWHERE = "page, JSON"  # as in Dynolog
    JSON = "JSON"
    NOT = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynologMetric:
    """One metric. name: in JSON, without `.INTERFACE`; unit: of its value.

    meaning: the help text on the page; ours: its source here, as Markdown; note: a difference, or why it is not served.
    """

    name: str
    unit: str = ""
    meaning: str = ""
    ours: str = ""
    note: str = ""
    served: ServedIn


def _cpu(*modes: str) -> str:
    return f"`kineto_host_cpu_seconds_total`: {', '.join(f'`{mode}`' for mode in modes)}"


def _host() -> Iterator[DynologMetric]:
    page, json = ServedIn.EVERYWHERE, ServedIn.JSON
    # Formatted by hand: a metric is a line, or two with its place.
    # fmt: off
    yield DynologMetric(
        name="uptime", unit="s", meaning="Time since boot.", ours="`time() - kineto_host_boot_time_seconds`",
        served=page,
    )
    yield DynologMetric(
        name="cpu_util", unit="%", meaning="CPU time of all CPUs that was not idle.", ours=_cpu("idle"),
        note="100 minus the idle time, so waiting for disks counts as busy", served=page,
    )
    for name, mode in (("cpu_u", "user"), ("cpu_s", "system"), ("cpu_i", "idle")):
        yield _of_cpus(name, "%", mode, page)
    for mode in _GUESTS.values():
        yield _of_cpus(f"cpu_{mode}", "%", mode, json)
    for letter, mode in _MODES.items():
        yield _of_cpus(f"cpu_{letter}_ms", "ms", mode, json if mode == "steal" else page)
    for mode in _GUESTS.values():
        yield _of_cpus(f"cpu_{mode}_ms", "ms", mode, json)
    for way, our_way, what in (("rx", "receive", "received"), ("tx", "transmit", "sent")):
        packets = "Incoming packets" if way == "rx" else "Outgoing packets"
        for unit, text in (
            ("bytes", f"Bytes {what}"), ("packets", f"Packets {what}"), ("errors", f"Packets {what} with errors"),
            ("drops", f"{packets} dropped"),
        ):
            yield DynologMetric(
                name=f"{way}_{unit}", unit=unit, meaning=f"{text} by an interface, in the interval.",
                ours=f"`kineto_host_network_{our_way}_{unit}_total`", served=page,
            )
    for name, unit in (("mips", "10^6/s"), ("mega_cycles_per_second", "MHz")):
        yield DynologMetric(name=name, unit=unit, note=_NO_PERF, served=ServedIn.NOT)
    yield DynologMetric(
        name="cpu_u_nodeN, cpu_s_nodeN, cpu_i_nodeN", unit="%", served=ServedIn.NOT,
        note="missing from Dynolog's outputs, too, since Dynolog assumes that every host has one socket",
    )


    # fmt: on


def _of_cpus(name: str, unit: str, mode: str, served: ServedIn) -> DynologMetric:
    guests = _GUESTS.get(mode)
    return DynologMetric(
        name=name,
        unit=unit,
        meaning=f"CPU time of all CPUs in mode {mode}, in the interval.",
        ours=_cpu(mode, guests) if guests else _cpu(mode),
        note="includes time in guests" if guests else "",
        served=served,
    )


def _rate(name: str) -> str:
    return f"`rate(kineto_gpu_{name}_total[1m])`"


def _gpus() -> Iterator[DynologMetric]:
    # Formatted by hand: a metric is a line.
    # fmt: off
    for name, unit, ours, note in (
        ("gpu_frequency_mhz", "MHz", "`kineto_gpu_sm_clock_hertz / 1e6`", ""),
        ("gpu_device_utilization", "%", "`100 * kineto_gpu_utilization_ratio`", ""),
        ("gpu_memory_utilization", "%", "`100 * kineto_gpu_memory_utilization_ratio`",
         "as in Dynolog: time in which memory was read or written, not how much is in use"),
        ("gpu_power_draw", "W", "`kineto_gpu_power_watts`", ""),
        ("graphics_engine_active_ratio", "ratio", _rate("graphics_active_seconds"), _HOPPER),
        ("sm_active_ratio", "ratio", _rate("sm_active_seconds"), _HOPPER),
        ("sm_occupancy", "ratio", _rate("sm_occupancy_seconds"), _HOPPER),
        ("tensorcore_active", "ratio", _rate("tensor_active_seconds"), _HOPPER),
        ("hbm_mem_bw_util", "ratio", _rate("dram_active_seconds"), _HOPPER),
        ("fp64_active", "ratio", _rate("fp64_active_seconds"), _HOPPER),
        ("fp32_active", "ratio", _rate("fp32_active_seconds"), _HOPPER),
        ("fp16_active", "ratio", _rate("fp16_active_seconds"), _HOPPER),
        ("pcie_tx_bytes", "B/s", _rate("pcie_transmit_bytes"), _PCIE),
        ("pcie_rx_bytes", "B/s", _rate("pcie_receive_bytes"), _PCIE),
        ("nvlink_tx_bytes", "B/s", _rate("nvlink_transmit_bytes"), _NVLINK),
        ("nvlink_rx_bytes", "B/s", _rate("nvlink_receive_bytes"), _NVLINK),
        ("device", "index", "label `gpu`", "also for AMD and Intel GPUs, numbered after NVIDIA's"),
        ("minor_id", "index", "label `device`", "only for NVIDIA GPUs"),
        ("gpu_name", "text", "label `modelName`", ""),
        ("gpu_uuid", "text", "label `UUID`", ""),
        ("job_id", "text", "label `hpc_job`", "from `metrics.gpu_jobs_dir`, else from its processes' control groups"),
        ("username", "text", "", "owner of its processes according to the kernel, if that is one user"),
        ("pod_namespace", "text", "label `namespace`", ""),
        ("pod_name", "text", "label `pod`", ""),
        ("container_name", "text", "label `container`", ""),
        ("slurm_account", "text", "", _ENVIRONMENT),
        ("slurm_partition", "text", "", _ENVIRONMENT),
    ):
        yield DynologMetric(name=name, unit=unit, ours=ours, note=note, served=ServedIn.JSON)
    yield DynologMetric(
        name="dcgm_error", unit="0 or 1", ours="`kineto_gpu_up`, `kineto_gpu_library_up`", served=ServedIn.NOT,
        note="whether DCGM had a value for every field; kinetod does not ask DCGM",
    )
    yield DynologMetric(
        name="duty_cycle, memory_total, memory_used, tpu_error", note="for TPUs, which kinetod does not support",
        served=ServedIn.NOT,
    )


    # fmt: on


HOST_METRICS: tuple[DynologMetric, ...] = tuple(_host())


GPU_METRICS: tuple[DynologMetric, ...] = tuple(_gpus())
