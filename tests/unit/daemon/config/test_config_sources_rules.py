"""Settings that cannot work, alone or together, are refused with what to do."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kinetod.__main__ import command
from kinetod.config import config_sources
from kinetod.config.config_sources import ConfigError, has_otlp, load

ENVIRON = {"CONFIGURATION_DIRECTORY": "/nonexistent/kinetod"}


def problems(folder: Path, text: str) -> str:
    file = folder / "config.toml"
    file.write_text(f"[hooks]\n{text}\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError) as raised:
        load(file, {}, ENVIRON)
    return str(raised.value)


def test_a_usual_configuration_is_taken(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    file = tmp_path / "config.toml"
    file.write_text(
        '[hooks]\non = ["failed", "partial"]\ncommand = ["/bin/cat", "-A"]\n'
        f'webhook = ["https://ci/hook", "http://127.0.0.1:8080/x"]\nwebhook_secret = "{secret}"\n'
    )
    config = load(file, {}, ENVIRON).config
    assert (config.hook_on, config.hook_command) == (("failed", "partial"), ("/bin/cat", "-A"))
    assert config.hook_webhooks == ("https://ci/hook", "http://127.0.0.1:8080/x")
    assert config.hook_secret == secret


def test_commands_that_cannot_or_must_not_be_run_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "hook"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o644)
    assert "is not an absolute path; PATH is not searched" in problems(tmp_path, 'command = ["hook"]')
    assert f"{tmp_path}/none: No such file" in problems(tmp_path, f'command = ["{tmp_path}/none"]')
    assert "cannot be executed by this user" in problems(tmp_path, f'command = ["{tmp_path}"]')
    script.chmod(0o757)
    assert "can be changed by everybody (mode 0757)" in problems(tmp_path, f'command = ["{script}"]')


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    assert "hooks.on[0]" in problems(tmp_path, 'on = ["ended"]')
    many = ", ".join(f'"https://h/{number}"' for number in range(9))
    assert "has 9 addresses; at most 8 are allowed" in problems(tmp_path, f"webhook = [{many}]")
    secret = tmp_path / "secret"
    secret.write_bytes(b"short")
    secret.chmod(0o600)
    assert "a secret needs at least 16: openssl rand" in problems(tmp_path, f'webhook_secret = "{secret}"')


def test_profiles_need_headers_that_are_some(tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    headers.write_text("Authorization = x")
    headers.chmod(0o600)
    asked = f'profiles = "pyroscope+https://p:4040"\nprofiles_headers = "{headers}"'
    assert f"hooks.profiles_headers: {headers} line 1 is not of the form `Name: value`" in problems(tmp_path, asked)
    assert "hooks.profiles: expected otlp+https://host:4318" in problems(tmp_path, 'profiles = "https://p"')


def test_otlp_needs_its_package_and_pyroscope_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_sources, "has_otlp", lambda: False)
    said = problems(tmp_path, 'profiles = "otlp+https://c:4318"')
    assert f"OTLP needs the package opentelemetry-proto; run {sys.executable} -m pip install opentelemetry" in said
    file = tmp_path / "config.toml"
    file.write_text('[hooks]\nprofiles = "pyroscope+https://p:4040"\n')
    assert load(file, {}, ENVIRON).config.hook_profiles == "pyroscope+https://p:4040"


def test_whether_that_package_is_installed_is_seen_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_otlp()
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.profiles.v1development", None)
    assert not has_otlp()


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "gpu-host:1"])
def test_a_network_address_is_refused_without_certificates(text: str) -> None:
    result = CliRunner().invoke(command, ["--check-config", "--listen", text])
    assert "is not a loopback address and needs certificates" in str(result.exception)


def dynolog_problems(folder: Path, text: str, more: str = "") -> str:
    file = folder / "config.toml"
    file.write_text(f"[dynolog]\n{text}\n{more}")
    file.chmod(0o600)
    try:
        load(file, {}, ENVIRON)
    except ConfigError as exc:
        return str(exc)
    return ""


def test_the_door_for_dynologs_clients_is_open_to_other_hosts_only_if_that_is_said(tmp_path: Path) -> None:
    for harmless in ("loopback", "127.0.0.1:65406", "[::1]:1778", "unix:/run/kineto/dynolog"):
        assert dynolog_problems(tmp_path, f'rpc = "{harmless}"') == ""
    for address in ("0.0.0.0:1778", "[::]:1778", "10.0.0.7:1778"):
        assert "Dynolog's protocol does not authenticate them" in dynolog_problems(tmp_path, f'rpc = "{address}"')
        assert dynolog_problems(tmp_path, f'rpc = "{address}"\nallow_remote = true') == ""


def test_forwarded_ports_of_kubernetes_do_not_end_at_the_door_for_dynologs_clients(tmp_path: Path) -> None:
    kubernetes = '[access]\nkubernetes = true\n[kubernetes]\nnode_name = "n"\n'
    assert "socket owned by root" in dynolog_problems(tmp_path, 'rpc = "loopback"', kubernetes)
    assert dynolog_problems(tmp_path, 'rpc = "unix:/run/kineto/dynolog"', kubernetes) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('compat = "dynolog"', "metrics.compat: has no effect without metrics.listen"),
        ('compat = "collectd"', "metrics.compat: 'collectd' is not one of off, dynolog"),
        ('gpu_interval = "10s"', "metrics.gpu_interval: has no effect without metrics.json_log"),
        ('gpu_interval = "10ms"\njson_log = "log"', "metrics.gpu_interval: must be 0 or at least 1s"),
        ('json_log = "metrics.log"', "metrics.json_log: 'metrics.log' is neither 'log' nor an absolute path"),
        ('host_interval = "0"', "metrics.host_interval: must be at least 1s"),
    ],
)
def test_metrics_under_other_names_that_would_do_nothing_or_too_much_are_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[metrics]\n{text}\n")
    with pytest.raises(ConfigError) as raised:
        load(file, {}, ENVIRON)
    assert problem in str(raised.value)


def test_metrics_under_dynologs_names_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[metrics]\nlisten = "127.0.0.1:8080"\ncompat = "dynolog"\njson_log = "/var/log/kinetod/metrics.log"\n'
        'host_interval = "60s"\ngpu_interval = "10s"\ninterfaces = ["eno", "eth"]\n'
    )
    config = load(file, {}, ENVIRON).config
    assert (config.metrics_compat, config.json_log) == ("dynolog", "/var/log/kinetod/metrics.log")
    assert (config.host_interval_ns, config.gpu_interval_ns) == (60 * 10**9, 10 * 10**9)
    assert config.metrics_interfaces == ("eno", "eth")
