"""The units, by systemd's own judgement."""

import configparser
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[3] / "deploy/systemd"
NAMES = (
    "kinetod.service", "kinetod-attach.socket", "kinetod-attach.service", "kinetod-counters.socket",
    "kinetod-counters.service", "kinetod-writer.socket", "kinetod-writer.service", "kinetod-web.service",
)  # fmt: skip
HELPERS = {"kinetod-attach.service": "kineto-attach", "kinetod-writer.service": "kineto-writer"}
FRONT_END_EXPOSURE = 3.0
# What systemd makes a seccomp filter of; systemd.exec(5), and its sources for those that do not say so.
SECCOMP_SETTINGS = {
    "SystemCallFilter", "SystemCallArchitectures", "SystemCallLog", "RestrictAddressFamilies", "RestrictNamespaces",
    "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute", "ProtectClock",
    "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "PrivateDevices",
    "DynamicUser",
}  # fmt: skip

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze (apt-get install systemd)"
)


def settings(name: str) -> list[tuple[str, str]]:
    lines = (line.partition("=") for line in (UNITS / name).read_text().splitlines() if re.match(r"[A-Z]\w+=", line))
    return [(key, value) for key, _, value in lines]


@pytest.fixture
def units(tmp_path: Path) -> Iterator[Path]:
    """The units with a program that exists."""
    for name in NAMES:
        text = (UNITS / name).read_text()
        (tmp_path / name).write_text(re.sub(r"/opt/kinetod/bin/[\w-]+", "/bin/true", text))
    yield tmp_path


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_units(units: Path) -> None:
    paths = [str(units / name) for name in NAMES]
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_quota_comes_in_parts_so_short_that_no_client_notices_when_one_is_used_up() -> None:
    assert ("CPUQuotaPeriodSec", "10ms") in settings("kinetod.service")


def exposure(unit: Path) -> float:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    match = re.search(r"exposure level for .*: ([\d.]+)", done.stdout)
    assert match, done.stdout
    return float(match[1])


@needs_systemd
def test_what_has_no_right_over_processes_is_hardly_exposed(units: Path) -> None:
    assert exposure(units / "kinetod.service") <= FRONT_END_EXPOSURE
    assert exposure(units / "kinetod-web.service") <= FRONT_END_EXPOSURE
    assert exposure(units / "kinetod-counters.service") <= FRONT_END_EXPOSURE
    assert exposure(units / "kinetod-writer.service") <= FRONT_END_EXPOSURE


def test_the_front_end_has_no_capability_and_its_helpers_those_that_they_give_a_reason_for() -> None:
    front = dict(settings("kinetod.service"))
    assert (front["CapabilityBoundingSet"], front["AmbientCapabilities"], front["User"]) == ("", "", "kineto")
    sampler = dict(settings("kinetod-counters.service"))
    assert (sampler["CapabilityBoundingSet"], sampler["AmbientCapabilities"]) == ("", "")
    assert sampler["User"] == "kineto-counters"
    for name, user in HELPERS.items():
        helper = dict(settings(name))
        assert helper["User"] == user
        assert helper["CapabilityBoundingSet"] == helper["AmbientCapabilities"]
        comments = [line for line in (UNITS / name).read_text().splitlines() if line.startswith("# ")]
        for capability in helper["CapabilityBoundingSet"].split():
            assert any(re.match(rf"# (CAP_\w+, )*{capability}\b", line) for line in comments), capability


def test_a_decoder_that_is_ended_for_its_memory_does_not_stop_the_front_end() -> None:
    front_end = settings("kinetod.service")
    assert ("OOMPolicy", "continue") in front_end
    assert "MemoryMax" in dict(front_end)


@pytest.mark.parametrize("name", ["kinetod.service", "kinetod-web.service"])
def test_the_front_ends_may_confine_their_workers(name: str) -> None:
    filters = [value.split() for key, value in settings(name) if key == "SystemCallFilter"]
    assert filters[-1] == ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp"]


def test_the_helper_uses_nothing_that_gives_it_a_seccomp_filter() -> None:
    assert not SECCOMP_SETTINGS & {key for key, _ in settings("kinetod-attach.service")}


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".service")])
def test_a_service_imports_nothing_from_the_folder_that_it_is_started_in(name: str) -> None:
    assert "PYTHONSAFEPATH=1" in dict(settings(name))["Environment"].split()


def test_every_user_of_the_units_is_made() -> None:
    made = set(re.findall(r"^u (\S+) ", (UNITS / "sysusers.d.conf").read_text(), re.MULTILINE))
    for name in NAMES:
        used = {value for key, value in settings(name) if key in ("User", "Group", "SocketUser", "SocketGroup")}
        assert used - {"root"} <= made or ("DynamicUser", "yes") in settings(name)


def test_the_sockets_are_where_the_daemon_looks_for_them() -> None:
    from kinetod.config.addresses import COUNTERS_SOCKET, HELPER_SOCKET, WRITER_SOCKET

    assert dict(settings("kinetod-attach.socket"))["ListenSequentialPacket"] == str(HELPER_SOCKET)
    assert dict(settings("kinetod-writer.socket"))["ListenSequentialPacket"] == str(WRITER_SOCKET)
    assert dict(settings("kinetod-counters.socket"))["ListenSequentialPacket"] == str(COUNTERS_SOCKET)


def test_nothing_enables_or_wants_the_writer_before_an_administrator_does() -> None:
    for name in NAMES:
        for key, value in settings(name):
            if key in ("Also", "Wants", "Requires") and name != "kinetod-writer.service":
                assert "kinetod-writer" not in value, name


def test_the_writer_may_change_its_user_and_write_nowhere_before_an_administrator_says_where() -> None:
    writer = settings("kinetod-writer.service")
    assert ("CapabilityBoundingSet", "CAP_SETUID CAP_SETGID") in writer
    assert ("ProtectSystem", "strict") in writer and "ReadWritePaths" not in dict(writer)
    assert [value for key, value in writer if key == "SystemCallFilter"][-1] == "setgroups setresgid setresuid capset"


def test_unit_files_have_no_setting_twice_by_mistake() -> None:
    several = {"DeviceAllow", "LoadCredential", "SystemCallFilter"}
    for name in NAMES:
        keys = [key for key, _ in settings(name)]
        assert {key for key in keys if keys.count(key) > 1} <= several
        configparser.RawConfigParser(strict=False).read_string((UNITS / name).read_text())


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_a_flood_of_lines_is_cut(unit: str) -> None:
    assert "LogRateLimitBurst=" in (UNITS / unit).read_text()
