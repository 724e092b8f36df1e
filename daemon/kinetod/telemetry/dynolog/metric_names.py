"""Every metric of Dynolog, which of kinetod's it is, and whether it is served: the table of docs/metrics.md.

The facts are those of Dynolog's sources as of August 2026. Its Prometheus page has a fixed list of names, none of a
GPU; its other loggers have all of them. A test compares what is served with what this table says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class ServedIn(Enum):
    """Where a metric of Dynolog's is found here; the value is what the document says."""

    EVERYWHERE = "page, JSON"  # as in Dynolog
    JSON = "JSON"
    NOT = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynologMetric:
    """One metric. name: in JSON, without `.INTERFACE`; unit: of its value.

    meaning: the help text on the page; ours: what it is made of here, as Markdown; note: a difference, or why it is not
    served.
    """

    name: str
    unit: str = ""
    meaning: str = ""
    ours: str = ""
    note: str = ""
    served: ServedIn


def _cpu(*modes: str) -> str:
    return f"`kineto_host_cpu_seconds_total`: {', '.join(f'`{mode}`' for mode in modes)}"


_NO_PERF = (
    "the counters of the CPUs are not read: that needs CAP_PERFMON or `kernel.perf_event_paranoid` of 0 and a system "
    "call that the service is not allowed, and takes two counters of each CPU from those who profile there; "
    "node-exporter has them (`--collector.perf`). Dynolog's page has 0 without `--enable_perf_monitor`"
)
_HOPPER = "on NVIDIA's GPUs from Hopper on, by the counters that DCGM reads there; not in MIG mode"
_NVLINK = "from Hopper on with headers, as in DCGM; before, and in kinetod's metric, the payload only"
_PCIE = "before Hopper: what the driver measures for 20 ms"
_ENVIRONMENT = "as all processes on the GPU have it in their environment, if kinetod may read that (run by root)"
_MODES = {"u": "user", "s": "system", "n": "nice", "w": "iowait", "x": "irq", "y": "softirq", "z": "steal"}
_GUESTS = {"user": "guest", "nice": "guest_nice"}  # the kernel counts them in both


def _host() -> Iterator[DynologMetric]:
    page, json = ServedIn.EVERYWHERE, ServedIn.JSON
    # By hand: a metric is a line, or two with its place.
    # fmt: off
    yield DynologMetric(
        name="uptime", unit="s", meaning="Time since the boot.", ours="`time() - kineto_host_boot_time_seconds`",
        served=page,
    )
    yield DynologMetric(
        name="cpu_util", unit="%", meaning="Time of all CPUs that was not idle.", ours=_cpu("idle"),
        note="100 less the idle time: waiting for disks counts as busy", served=page,
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
        for unit, text in (
            ("bytes", f"Bytes {what}"), ("packets", f"Packets {what}"), ("errors", f"Packets {what} with errors"),
            ("drops", f"Packets dropped that were to be {what}"),
        ):
            yield DynologMetric(
                name=f"{way}_{unit}", unit=unit, meaning=f"{text} by an interface, in the interval.",
                ours=f"`kineto_host_network_{our_way}_{unit}_total`", served=page,
            )
    for name, unit in (("mips", "10^6/s"), ("mega_cycles_per_second", "MHz")):
        yield DynologMetric(name=name, unit=unit, note=_NO_PERF, served=ServedIn.NOT)
    yield DynologMetric(
        name="cpu_u_nodeN, cpu_s_nodeN, cpu_i_nodeN", unit="%", served=ServedIn.NOT,
        note="in no output of Dynolog either: it takes every host to have one socket",
    )
    # fmt: on


def _of_cpus(name: str, unit: str, mode: str, served: ServedIn) -> DynologMetric:
    guests = _GUESTS.get(mode)
    return DynologMetric(
        name=name,
        unit=unit,
        meaning=f"Time of all CPUs in mode {mode}, in the interval.",
        ours=_cpu(mode, guests) if guests else _cpu(mode),
        note="time in guests included" if guests else "",
        served=served,
    )


def _rate(name: str) -> str:
    return f"`rate(kineto_gpu_{name}_total[1m])`"


def _gpus() -> Iterator[DynologMetric]:
    # By hand: a metric is a line.
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
        ("device", "index", "label `gpu`", "also AMD's and Intel's GPUs, after NVIDIA's"),
        ("minor_id", "index", "label `device`", "of NVIDIA's GPUs only"),
        ("gpu_name", "text", "label `modelName`", ""),
        ("gpu_uuid", "text", "label `UUID`", ""),
        ("job_id", "text", "label `hpc_job`", "by `metrics.gpu_jobs_dir`, else by the control groups of its processes"),
        ("username", "text", "", "the owner of its processes by the kernel, if that is one user"),
        ("pod_namespace", "text", "label `namespace`", ""),
        ("pod_name", "text", "label `pod`", ""),
        ("container_name", "text", "label `container`", ""),
        ("slurm_account", "text", "", _ENVIRONMENT),
        ("slurm_partition", "text", "", _ENVIRONMENT),
    ):
        yield DynologMetric(name=name, unit=unit, ours=ours, note=note, served=ServedIn.JSON)
    yield DynologMetric(
        name="dcgm_error", unit="0 or 1", ours="`kineto_gpu_up`, `kineto_gpu_library_up`", served=ServedIn.NOT,
        note="says whether DCGM had a value for every field; it is not asked",
    )
    yield DynologMetric(
        name="duty_cycle, memory_total, memory_used, tpu_error", note="of TPUs, which kinetod does not know",
        served=ServedIn.NOT,
    )
    # fmt: on


HOST_METRICS: tuple[DynologMetric, ...] = tuple(_host())
GPU_METRICS: tuple[DynologMetric, ...] = tuple(_gpus())
