"""Dynolog's names on the page, with its labels and types, and the table that says which metrics there are."""

from pathlib import Path

import msgspec
from kinetod.gpus.gpu_activity import NAMES, GpuActivity
from kinetod.gpus.gpu_types import GpuState
from kinetod.telemetry.dynolog.gpu_values import GpuUser, gpu_values
from kinetod.telemetry.dynolog.host_values import NETWORK, HostCounters, Value, host_values
from kinetod.telemetry.dynolog.metric_names import GPU_METRICS, HOST_METRICS, ServedIn
from kinetod.telemetry.dynolog.page_metrics import DynologCollector
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

# The names that Dynolog registers with its Prometheus library (dynolog/src/Metrics.cpp).
DYNOLOGS_PAGE = {
    *("cpu_util", "cpu_u", "cpu_s", "cpu_i", "mips", "mega_cycles_per_second", "uptime"),
    *("cpu_u_ms", "cpu_s_ms", "cpu_n_ms", "cpu_w_ms", "cpu_x_ms", "cpu_y_ms"),
    *("tx_bytes", "rx_bytes", "tx_packets", "rx_packets", "tx_errors", "rx_errors", "tx_drops", "rx_drops"),
}
NOT_MEASURED = {"mips", "mega_cycles_per_second"}


def everything_of_a_host() -> dict[str, Value]:
    modes = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    before, after = (
        HostCounters(
            time_ns=0, uptime_s=7, cpu_ticks=dict.fromkeys(modes, ticks), interfaces={"eth0": (ticks,) * len(NETWORK)}
        )
        for ticks in (0, 10)
    )
    return host_values(before, after)


def page(values: dict[str, Value]) -> str:
    registry = CollectorRegistry()
    registry.register(DynologCollector(lambda: values, "node1"))
    return generate_latest(registry).decode()


def samples(values: dict[str, Value]) -> dict[str, list[tuple[dict[str, str], float]]]:
    families = text_string_to_metric_families(page(values))
    return {family.name: [(each.labels, each.value) for each in family.samples] for family in families}


def test_the_page_has_dynologs_names_but_those_that_are_not_measured() -> None:
    assert samples({}).keys() == DYNOLOGS_PAGE - NOT_MEASURED


def test_all_are_gauges_with_dynologs_labels() -> None:
    found = samples({"uptime": 5120, "cpu_u": 12.5, "rx_bytes.eth0": 7, "rx_bytes.bond0.100": 8, "cpu_z_ms": 1})
    assert {name: given for name, given in found.items() if given} == {
        "uptime": [({"host_name": "node1"}, 5120)],
        "cpu_u": [({"host_name": "node1"}, 12.5)],
        "rx_bytes": [({"host_name": "node1", "net": "eth0"}, 7), ({"host_name": "node1", "net": "bond0.100"}, 8)],
    }
    types = {line.split()[3] for line in page({"uptime": 1}).splitlines() if line.startswith("# TYPE")}
    assert types == {"gauge"}


def test_what_is_not_known_has_no_series() -> None:
    assert {name for name, given in samples({"uptime": 1}).items() if given} == {"uptime"}


def test_the_table_says_served_of_exactly_what_is_served() -> None:
    host = {name.partition(".")[0] for name in everything_of_a_host()}
    assert {metric.name for metric in HOST_METRICS if metric.served is not ServedIn.NOT} == host
    numbers = dict.fromkeys(("sm_clock_hertz", "utilization", "memory_utilization", "power_watts"), 1.0)
    counted = dict.fromkeys(("nvlink_transmit_bytes", "nvlink_receive_bytes"), 1)
    pcie = dict.fromkeys(("pcie_transmit_bytes_per_second", "pcie_receive_bytes_per_second"), 1.0)
    full = GpuState(vendor="nvidia", index=0, uuid="u", name="n", device="nvidia0", **numbers, **counted, **pcie)  # type: ignore[arg-type]
    before, after = (
        msgspec.structs.replace(
            full, activity=GpuActivity(since_ns=1, seconds=seconds, totals=dict.fromkeys(NAMES, 1.0))
        )
        for seconds in (1.0, 2.0)
    )
    user = GpuUser(
        job_id="1",
        username="a",
        slurm_account="e",
        slurm_partition="f",
        pod_namespace="b",
        pod_name="c",
        container_name="d",
    )
    gpu = gpu_values(after, before, 1.0, user).keys()
    assert {metric.name for metric in GPU_METRICS if metric.served is not ServedIn.NOT} == gpu


def test_what_is_not_served_says_why_and_what_is_says_what_it_is() -> None:
    for metric in (*HOST_METRICS, *GPU_METRICS):
        assert metric.note if metric.served is ServedIn.NOT else metric.ours or metric.note, metric.name
        assert metric.meaning if metric.served is ServedIn.EVERYWHERE else True, metric.name


def test_the_table_has_every_name_of_dynologs_document_and_page() -> None:
    names = {name for metric in (*HOST_METRICS, *GPU_METRICS) for name in metric.name.split(", ")}
    fields = {
        *("graphics_engine_active_ratio", "sm_active_ratio", "sm_occupancy", "gpu_frequency_mhz", "fp16_active"),
        *("fp32_active", "fp64_active", "tensorcore_active", "hbm_mem_bw_util", "pcie_tx_bytes", "pcie_rx_bytes"),
        *("nvlink_tx_bytes", "nvlink_rx_bytes", "minor_id", "gpu_device_utilization", "gpu_memory_utilization"),
        *("gpu_power_draw", "gpu_name", "gpu_uuid", "dcgm_error", "device"),
    }
    attribution = {"job_id", "username", "slurm_account", "slurm_partition", "pod_namespace", "pod_name"}
    more = {"cpu_guest", "cpu_guest_nice", "cpu_z_ms", "cpu_guest_ms", "cpu_guest_nice_ms", "container_name"}
    assert DYNOLOGS_PAGE | fields | attribution | more <= names


def test_every_query_of_the_table_asks_for_metrics_that_exist() -> None:
    import re

    document = (Path(__file__).parents[5] / "docs/metrics.md").read_text()
    known = set(re.findall(r"^\| `(kineto_\w+)` \|", document, re.MULTILINE))
    for metric in (*HOST_METRICS, *GPU_METRICS):
        assert set(re.findall(r"kineto_[a-z0-9_]+", metric.ours)) <= known, metric.name
