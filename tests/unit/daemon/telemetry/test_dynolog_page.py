"""Dynolog's names on the page, with its labels and types, and the table that says which metrics there are."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from kinetod.gpus.gpu_types import NAMES, GpuActivity, GpuState
from kinetod.telemetry.dynolog_page import (
    GPU_METRICS,
    HOST_METRICS,
    NETWORK,
    DynologCollector,
    HostCounters,
    ServedIn,
    Value,
    host_values,
    read_counters,
)
from kinetod.telemetry.dynolog_samplers import GpuUser, gpu_values
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

# The names that Dynolog registers with its Prometheus library (dynolog/src/Metrics.cpp).
DYNOLOGS_PAGE = {
    *("cpu_util", "cpu_u", "cpu_s", "cpu_i", "mips", "mega_cycles_per_second", "uptime"),
    *("cpu_u_ms", "cpu_s_ms", "cpu_n_ms", "cpu_w_ms", "cpu_x_ms", "cpu_y_ms"),
    *("tx_bytes", "rx_bytes", "tx_packets", "rx_packets", "tx_errors", "rx_errors", "tx_drops", "rx_drops"),
}
NOT_MEASURED = {"mips", "mega_cycles_per_second"}
STAT = "cpu  {user} 40 300 {idle} 60 7 8 9 20 4\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1\n"
NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 100 10 0 0 0 0 0 0 100 10 0 0 0 0 0 0
  eth0:{rx}  22 3 4 0 0 0 0 5000 55 6 7 0 0 0 0
"""  # noqa: E501  # as the kernel writes it


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

    document = (Path(__file__).parents[4] / "docs/metrics.md").read_text()
    known = set(re.findall(r"^\| `(kineto_\w+)` \|", document, re.MULTILINE))
    for metric in (*HOST_METRICS, *GPU_METRICS):
        assert set(re.findall(r"kineto_[a-z0-9_]+", metric.ours)) <= known, metric.name


def proc(folder: Path, *, user: int = 100, idle: int = 1000, rx: int = 4000, uptime: str = "5120.67 1.0") -> Path:
    (folder / "net").mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(STAT.format(user=user, idle=idle))
    (folder / "uptime").write_text(f"{uptime}\n")
    (folder / "net/dev").write_text(NET_DEV.format(rx=rx))
    return folder


def between(tmp_path: Path, before: Mapping[str, int], after: Mapping[str, int], *prefixes: str) -> dict[str, object]:
    first = read_counters(proc(tmp_path / "before", **before))  # type: ignore[arg-type]
    return dict(host_values(first, read_counters(proc(tmp_path / "after", **after)), prefixes))  # type: ignore[arg-type]


def test_counters_are_those_of_the_kernels_files(tmp_path: Path) -> None:
    found = read_counters(proc(tmp_path), lambda: [(1, "lo"), (2, "eth0")])
    assert found == HostCounters(
        time_ns=found.time_ns,
        uptime_s=5120,
        cpu_ticks={
            "user": 100, "nice": 40, "system": 300, "idle": 1000, "iowait": 60, "irq": 7, "softirq": 8, "steal": 9,
            "guest": 20, "guest_nice": 4,
        },
        interfaces={"lo": (100, 10, 0, 0, 100, 10, 0, 0), "eth0": (4000, 22, 3, 4, 5000, 55, 6, 7)},
        numbers={"lo": 1, "eth0": 2},
    )  # fmt: skip


def test_the_real_proc_is_understood() -> None:
    found = read_counters()
    assert found.uptime_s > 0
    assert len(found.cpu_ticks) >= 8
    assert "lo" in found.interfaces
    assert os.sysconf("SC_CLK_TCK") == 100  # what cpu_…_ms takes a tick for


def test_an_interval_has_percentages_milliseconds_and_differences(tmp_path: Path) -> None:
    found = between(tmp_path, {}, {"user": 130, "idle": 1070, "rx": 4500})
    assert {name: value for name, value in found.items() if "." not in name} == {
        "uptime": 5120,
        "cpu_util": pytest.approx(30),
        "cpu_u": 30,
        "cpu_s": 0,
        "cpu_i": 70,
        "cpu_guest": 0,
        "cpu_guest_nice": 0,
        "cpu_u_ms": 300,
        "cpu_s_ms": 0,
        "cpu_w_ms": 0,
        "cpu_n_ms": 0,
        "cpu_x_ms": 0,
        "cpu_y_ms": 0,
        "cpu_z_ms": 0,
        "cpu_guest_ms": 0,
        "cpu_guest_nice_ms": 0,
    }
    assert {name: value for name, value in found.items() if name.endswith(".eth0")} == {
        "rx_bytes.eth0": 500,
        "rx_packets.eth0": 0,
        "rx_errors.eth0": 0,
        "rx_drops.eth0": 0,
        "tx_bytes.eth0": 0,
        "tx_packets.eth0": 0,
        "tx_errors.eth0": 0,
        "tx_drops.eth0": 0,
    }


def test_the_first_reading_has_the_uptime_only(tmp_path: Path) -> None:
    assert host_values(None, read_counters(proc(tmp_path))) == {"uptime": 5120}


def test_an_interface_that_was_reset_or_has_come_waits_for_the_next_interval(tmp_path: Path) -> None:
    reset = between(tmp_path, {"rx": 4000}, {"rx": 10})
    assert {name for name in reset if "eth0" in name} == set()
    before = read_counters(proc(tmp_path / "before"))
    alone = HostCounters(time_ns=0, uptime_s=1, cpu_ticks=before.cpu_ticks, interfaces={})
    assert {name for name in host_values(alone, before) if "." in name} == set()


def test_another_interface_under_the_same_name_waits_too(tmp_path: Path) -> None:
    before = read_counters(proc(tmp_path / "before", rx=4000), lambda: [(1, "lo"), (2, "eth0")])
    after = read_counters(proc(tmp_path / "after", rx=5000), lambda: [(1, "lo"), (3, "eth0")])
    assert {name for name in host_values(before, after) if name.startswith("rx_bytes")} == {"rx_bytes.lo"}


def test_any_name_that_the_kernel_allows_is_read(tmp_path: Path) -> None:
    odd = (b"\xff\xfe", "a\u2028b".encode(), b"a\x1cb", b'q"\\')
    lines = b"".join(b"%6s: 1 2 3 4 0 0 0 0 5 6 7 8 0 0 0 0\n" % name for name in odd)
    (proc(tmp_path) / "net/dev").write_bytes(b"a\nb\n" + lines)
    found = read_counters(tmp_path, lambda: [(7, os.fsdecode(odd[0]))])
    assert dict(found.interfaces) == dict.fromkeys(
        ("\\xff\\xfe", "a\u2028b", "a\x1cb", 'q"\\'), (1, 2, 3, 4, 5, 6, 7, 8)
    )
    assert found.numbers == {"\\xff\\xfe": 7}


def test_time_that_the_kernel_takes_back_is_none(tmp_path: Path) -> None:
    found = between(tmp_path, {"idle": 1000}, {"user": 110, "idle": 990})
    assert (found["cpu_i"], found["cpu_u"], found["cpu_util"]) == (0, 100, 100)


def test_without_time_between_them_there_is_no_percentage(tmp_path: Path) -> None:
    assert not {name for name in between(tmp_path, {}, {}) if name.startswith("cpu_")}


def test_interfaces_can_be_chosen_by_how_they_begin(tmp_path: Path) -> None:
    assert {name for name in between(tmp_path, {}, {}, "en", "lo") if name.startswith("rx_bytes")} == {"rx_bytes.lo"}


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("stat", "cpu0 1 2 3\n", "/stat: 'cpu0 1 2 3'"),
        ("net/dev", "a\nb\neth0: 1 2\n", "unexpected line of net/dev: 'eth0: 1 2'"),
    ],
)
def test_other_text_in_proc_is_an_error_that_shows_it(tmp_path: Path, file: str, text: str, named: str) -> None:
    (proc(tmp_path) / file).write_text(text)
    with pytest.raises(ValueError, match=named):
        read_counters(tmp_path)
