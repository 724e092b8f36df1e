"""Differences and percentages of the host, as Dynolog computes them from /proc."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from kinetod.telemetry.dynolog.host_values import HostCounters, host_values, read_counters

STAT = "cpu  {user} 40 300 {idle} 60 7 8 9 20 4\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1\n"
NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 100 10 0 0 0 0 0 0 100 10 0 0 0 0 0 0
  eth0:{rx}  22 3 4 0 0 0 0 5000 55 6 7 0 0 0 0
"""  # noqa: E501  # as the kernel writes it


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
        ("stat", "cpu0 1 2 3\n", "begins with 'cpu0 1 2 3'"),
        ("net/dev", "a\nb\neth0: 1 2\n", "has the line 'eth0: 1 2'"),
    ],
)
def test_other_text_in_proc_is_an_error_that_shows_it(tmp_path: Path, file: str, text: str, named: str) -> None:
    (proc(tmp_path) / file).write_text(text)
    with pytest.raises(ValueError, match=named):
        read_counters(tmp_path)
