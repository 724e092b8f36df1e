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


_NO_PERF = "the counters of the CPUs are not read; Dynolog has them with `--enable_perf_monitor`, else its page has 0"
_PROFILING = "a hardware counter that DCGM reads; scrape dcgm-exporter"
_NVLINK = "payload by NVML's counters; DCGM counts headers too"
_PCIE = "the driver measures for 20 ms; DCGM over the interval"
_ENVIRONMENT = "Dynolog reads it in the environment of the processes, which they choose themselves"
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


def _gpus() -> Iterator[DynologMetric]:
    # By hand: a metric is a line.
    # fmt: off
    for name, unit, ours, note in (
        ("gpu_frequency_mhz", "MHz", "`kineto_gpu_sm_clock_hertz / 1e6`", ""),
        ("gpu_device_utilization", "%", "`100 * kineto_gpu_utilization_ratio`", ""),
        ("gpu_memory_utilization", "%", "`100 * kineto_gpu_memory_utilization_ratio`",
         "as in Dynolog: time in which memory was read or written, not how much is in use"),
        ("gpu_power_draw", "W", "`kineto_gpu_power_watts`", ""),
        ("pcie_tx_bytes", "B/s", "`kineto_gpu_pcie_transmit_bytes_per_second`", _PCIE),
        ("pcie_rx_bytes", "B/s", "`kineto_gpu_pcie_receive_bytes_per_second`", _PCIE),
        ("nvlink_tx_bytes", "B/s", "`rate(kineto_gpu_nvlink_transmit_bytes_total[1m])`", _NVLINK),
        ("nvlink_rx_bytes", "B/s", "`rate(kineto_gpu_nvlink_receive_bytes_total[1m])`", _NVLINK),
        ("device", "index", "label `gpu`", "also AMD's and Intel's GPUs, after NVIDIA's"),
        ("minor_id", "index", "label `device`", "of NVIDIA's GPUs only"),
        ("gpu_name", "text", "label `modelName`", ""),
        ("gpu_uuid", "text", "label `UUID`", ""),
        ("job_id", "text", "label `hpc_job`", "by `metrics.gpu_jobs_dir`, else by the control groups of its processes"),
        ("username", "text", "", "the owner of its processes by the kernel, if that is one user"),
        ("pod_namespace", "text", "label `namespace`", ""),
        ("pod_name", "text", "label `pod`", ""),
        ("container_name", "text", "label `container`", ""),
    ):
        yield DynologMetric(name=name, unit=unit, ours=ours, note=note, served=ServedIn.JSON)
    for name in (
        "graphics_engine_active_ratio", "sm_active_ratio", "sm_occupancy", "fp16_active", "fp32_active", "fp64_active",
        "tensorcore_active", "hbm_mem_bw_util",
    ):
        yield DynologMetric(name=name, unit="ratio", note=_PROFILING, served=ServedIn.NOT)
    yield DynologMetric(
        name="dcgm_error", unit="0 or 1", ours="`kineto_gpu_up`, `kineto_gpu_library_up`", served=ServedIn.NOT,
        note="says whether DCGM had a value for every field; it is not asked",
    )
    for name in ("slurm_account", "slurm_partition"):
        yield DynologMetric(name=name, unit="text", note=_ENVIRONMENT, served=ServedIn.NOT)
    yield DynologMetric(
        name="duty_cycle, memory_total, memory_used, tpu_error", note="of TPUs, which kinetod does not know",
        served=ServedIn.NOT,
    )
    # fmt: on


HOST_METRICS: tuple[DynologMetric, ...] = tuple(_host())
GPU_METRICS: tuple[DynologMetric, ...] = tuple(_gpus())
