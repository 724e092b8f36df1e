"""What becomes of Dynolog's flags: settings of kinetod, and a true report of each."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kinetoctl.base.unit_file import GivenFlag
from kinetoctl.dynolog_migration import (
    FLAGS,
    OWN_FLAGS,
    SWITCHES,
    FlagKind,
    FlagOutcome,
    Migrated,
    check_text,
    config_text,
    migrated,
    toml_value,
    write_text,
)
from kinetoctl.errors import NotMigrated, NotWritten
from support.service.daemon import IMPORT_PATH

NOTHING = {"dynolog.ipc": False, "dynolog.rpc": "loopback"}


def of(**flags: str | None) -> Migrated:
    given = [GivenFlag(name=name, value=value, where="here") for name, value in flags.items()]
    return migrated(given, {}, {})


def outcome(found: Migrated, flag: str) -> tuple[str, str]:
    (line,) = (line for line in found.report if line.subject.partition("=")[0] == f"--{flag}")
    return line.outcome.value, line.note


def test_without_flags_there_is_what_dynolog_does_then() -> None:
    found = of()
    assert found.settings == NOTHING
    assert [(line.subject, line.outcome, line.where) for line in found.report] == [
        ("--enable_ipc_monitor=false", FlagOutcome.SAME, "Dynolog's default"),
        ("--port=1778", FlagOutcome.APPROXIMATED, "Dynolog's default"),
    ]


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ({"enable_ipc_monitor": "true"}, {"dynolog.ipc": True}),
        ({"enable_ipc_monitor": "Y"}, {"dynolog.ipc": True}),
        ({"port": "1779"}, {"dynolog.rpc": "127.0.0.1:1779"}),
        ({"port": "0x6F3"}, {"dynolog.rpc": "127.0.0.1:1779"}),
        ({"port": "0"}, {"dynolog.rpc": ""}),
        ({"use_JSON": "1"}, {"metrics.json_log": "log", "metrics.host_interval": "60s"}),
        (
            {"use_JSON": "1", "enable_gpu_monitor": "1", "dcgm_reporting_interval_s": "30"},
            {"metrics.json_log": "log", "metrics.host_interval": "60s", "metrics.gpu_interval": "30s"},
        ),
        (
            {"use_prometheus": "1", "kernel_monitor_reporting_interval_s": "15", "enable_gpu_monitor": "1"},
            {"metrics.listen": "127.0.0.1:8080", "metrics.compat": "dynolog", "metrics.host_interval": "15s"},
        ),
        (
            {"use_prometheus": "1", "prometheus_address": "0.0.0.0", "prometheus_port": "9"},
            {
                "metrics.listen": "0.0.0.0:9", "metrics.allow_remote": True, "metrics.compat": "dynolog",
                "metrics.host_interval": "60s",
            },
        ),
        (
            {"use_prometheus": "1", "prometheus_address": "::1"},
            {"metrics.listen": "[::1]:8080", "metrics.compat": "dynolog", "metrics.host_interval": "60s"},
        ),
        (
            {"filter_nic_interfaces": "1", "allow_interface_prefixes": "eth,,ib"},
            {"metrics.interfaces": ["eth", "ib"]},
        ),
        ({"filter_nic_interfaces": "1"}, {"metrics.interfaces": ["eno", "ens", "enp", "enx", "eth"]}),
        ({"enable_pod_resources_attribution": "1"}, {"kubernetes.pod_resources": True}),
        (
            {"enable_pod_resources_attribution": "1", "pod_resources_socket": "/run/k.sock"},
            {"kubernetes.pod_resources": True, "kubernetes.kubelet_socket": "/run/k.sock"},
        ),
        ({"use_otlp": "1", "enable_perf_monitor": "1", "use_ODS": "1"}, {}),
    ],
)  # fmt: skip
def test_flags_become_settings(flags: dict[str, str], settings: dict[str, object]) -> None:
    assert of(**flags).settings == {**NOTHING, **settings}


def test_the_last_value_counts() -> None:
    given = [GivenFlag(name="port", value=value, where="here") for value in ("1", "2")]
    found = migrated(given, {}, {})
    assert found.settings["dynolog.rpc"] == "127.0.0.1:2"
    assert outcome(found, "port")[0] == "approximated"


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_reported_once_with_a_reason_unless_it_is_the_same(name: str) -> None:
    found = of(**{name: FLAGS[name].default or "1"})
    became, note = outcome(found, name)
    assert became == "same" or note
    assert became != "unknown"


def test_a_flag_that_another_one_leaves_without_effect_says_so() -> None:
    assert outcome(of(prometheus_port="9"), "prometheus_port") == (
        "no effect",
        "Dynolog ignores it too without --use_prometheus",
    )
    assert outcome(of(use_prometheus="1", prometheus_port="9"), "prometheus_port") == ("same", "")


def test_what_is_off_in_both_is_the_same() -> None:
    assert outcome(of(use_otlp="false"), "use_otlp") == ("same", "")
    assert outcome(of(use_otlp="true"), "use_otlp")[0] == "no counterpart"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("port", "many", "'many' is not a 32-bit integer"),
        ("port", "4294967296", "is not a 32-bit integer"),
        ("port", None, "has no value"),
        ("enable_ipc_monitor", "maybe", "'maybe' is neither true nor false"),
    ],
)
def test_what_gflags_would_not_take_has_no_effect_and_the_default_stays(
    name: str, value: str | None, said: str
) -> None:
    found = of(**{name: value})
    assert found.settings == NOTHING
    assert outcome(found, name)[0] == "no effect"
    assert said in outcome(found, name)[1]


def test_what_kinetod_cannot_have_is_approximated() -> None:
    host = of(use_prometheus="1", prometheus_address="node1")
    assert host.settings["metrics.listen"] == "127.0.0.1:8080"
    assert outcome(host, "prometheus_address")[0] == "approximated"
    port = of(use_prometheus="1", prometheus_port="0")
    assert port.settings["metrics.listen"] == "127.0.0.1:8080"
    assert outcome(port, "prometheus_port")[0] == "approximated"
    short = of(use_JSON="1", kernel_monitor_reporting_interval_s="0")
    assert short.settings["metrics.host_interval"] == "1s"
    assert outcome(short, "kernel_monitor_reporting_interval_s") == ("approximated", "1s is the shortest interval")


def test_an_unknown_flag_is_named_without_its_value() -> None:
    found = of(dcgm_report_interval_s="secret")
    assert outcome(found, "dcgm_report_interval_s") == ("unknown", "Dynolog has no such flag")
    assert "secret" not in str(found.report)


@pytest.mark.parametrize("name", ["access_token", "otlp_headers"])
def test_secrets_are_not_shown(name: str) -> None:
    assert "s3cret" not in str(of(**{name: "s3cret"}).report)


@pytest.mark.parametrize(
    ("given", "subject", "outcome", "said"),
    [
        (GivenFlag(name="access_token s3cret", value=None, where="x"), "--access_token", "no effect", "an equals sign"),
        (GivenFlag(name="unheard:s3cret", value=None, where="x"), "--unheard", "unknown", "no such flag"),
        (GivenFlag(name="", value="s3cret", where="x"), "--", "unknown", "no such flag"),
        (GivenFlag(name="use_JSON ", value=None, where="x"), "--use_JSON", "no effect", "blanks after its name"),
        (
            GivenFlag(name="use_JSON", value="true", where="x", programs="access_token=s3cret"),
            "--use_JSON", "no effect", "the line without dashes above it, 'access_token'",
        ),
    ],
)  # fmt: skip
def test_what_dynolog_ignores_is_told_without_what_follows_the_name(
    given: GivenFlag, subject: str, outcome: str, said: str
) -> None:
    found = migrated([given], {}, {})
    line = found.report[-1]
    assert (found.settings, line.subject, line.outcome.value) == (NOTHING, subject, outcome)
    assert said in line.note
    assert "s3cret" not in str(found)


@pytest.mark.parametrize(
    ("text", "rpc"),
    [
        *(("08", "127.0.0.1:8"), ("0x10", "127.0.0.1:16"), (" +12", "127.0.0.1:12")),
        *((text, "loopback") for text in ("1_0", "0o17", "12 ", "-0x10", "\u0661", "0b1", "9" * 20)),
    ],
)
def test_numbers_are_gflags(text: str, rpc: str) -> None:
    assert of(port=text).settings["dynolog.rpc"] == rpc


def test_no_interface_at_all_is_said_to_be_all() -> None:
    found = of(filter_nic_interfaces="1", allow_interface_prefixes="")
    assert found.settings["metrics.interfaces"] == []
    assert outcome(found, "allow_interface_prefixes") == (
        "approximated",
        "kinetod then reports all interfaces, Dynolog none",
    )


def test_the_login_in_a_url_is_not_shown() -> None:
    line = of(otlp_endpoint="https://me:s3cret@collector:4318/x").report[0]
    assert line.subject == "--otlp_endpoint=https://(not shown)@collector:4318/x"


def test_variables_and_settings_of_the_unit_are_reported() -> None:
    environ = {"KINETO_IPC_SOCKET_DIR": "/run/dynolog", "OTEL_SERVICE_NAME": "x", "PATH": "/bin"}
    found = migrated([], environ, {"MemoryMax": "1G", "Restart": "always"})
    assert found.settings == {**NOTHING, "dynolog.socket_dirs": ["/run/dynolog"]}
    told = {line.subject: line.outcome for line in found.report}
    assert told["KINETO_IPC_SOCKET_DIR"] is FlagOutcome.SAME
    assert told["OTEL_SERVICE_NAME"] is FlagOutcome.NO_COUNTERPART
    assert told["MemoryMax=1G"] is FlagOutcome.NO_COUNTERPART
    assert not {"PATH", "Restart=always"} & told.keys()


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), ('a"\\\n\x7f🙂', '"a\\"\\\\\\n\\u007f🙂"'), (["a", "b"], '["a", "b"]')],
)
def test_values_are_toml(value: bool | str | list[str], text: str) -> None:
    import tomllib

    assert toml_value(value) == text
    assert tomllib.loads(f"x = {text}") == {"x": value}


TAKES = (sys.executable, "-c", "")
REFUSES = (sys.executable, "-c", "import sys; sys.exit(f'kinetod: {sys.argv[1]} line 3: dynolog.rpc: no')")


@pytest.fixture(autouse=True)
def _kinetod_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)


def text_of(**flags: str) -> str:
    given = [GivenFlag(name=name, value=value, where="flags line 1") for name, value in flags.items()]
    return config_text(migrated(given, {}, {"User": "dyno"}), [Path("/etc/dynolog.gflags")])


def test_each_setting_stands_below_the_flags_that_decide_it() -> None:
    text = text_of(enable_ipc_monitor="true", use_otlp="true", use_JSON="true")
    body = text[text.index("[dynolog]") :]
    assert "# --enable_ipc_monitor=true (flags line 1): same\nipc = true\n" in body
    assert 'allows other addresses\nrpc = "loopback"\n\n[metrics]\n# --use_JSON=true (flags line 1): same;' in body
    assert (
        "# Without a setting here:\n# --use_otlp=true (flags line 1): no counterpart; kinetod pushes nothing;" in body
    )
    assert "# User=dyno (the unit): no counterpart;" in body
    assert "# Converted from: /etc/dynolog.gflags\n" in text


def test_who_names_folders_for_traces_is_told_what_enables_the_writer() -> None:
    told = " ".join(text_of(enable_ipc_monitor="true").replace("\n# ", " ").split())
    assert "`roots` of /etc/kinetod/writer.toml and in ReadWritePaths=" in told
    assert "`systemctl enable --now kinetod-writer.socket`" in told


def test_nothing_that_was_given_can_end_a_comment() -> None:
    text = text_of(otlp_endpoint='x\n[access]\nlocal_roles = ["admin"]', use_otlp="1")
    assert not [line for line in text.splitlines() if line.startswith(("[access]", "local_roles"))]


def test_kinetod_takes_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETOD_METRICS_LISTEN", "nonsense")  # of a shell: it must not count
    path = tmp_path / "config.toml"
    flags = {"use_prometheus": "1", "prometheus_address": "0.0.0.0", "use_JSON": "1", "enable_gpu_monitor": "1"}
    more = {"filter_nic_interfaces": "1", "enable_pod_resources_attribution": "1", "enable_ipc_monitor": "1"}
    write_text(text_of(**flags, **more, port="1779"), path, replace=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert 'rpc = "127.0.0.1:1779"' in path.read_text()


def test_what_kinetod_does_not_take_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(NotMigrated, match=r"kinetod does not accept the configuration:\n.*metrics\.listten"):
        write_text("[metrics]\nlistten = 1\n", path, replace=False)
    with pytest.raises(NotMigrated, match=r"configuration line 3: dynolog\.rpc: no"):
        check_text("", REFUSES)
    with pytest.raises(NotMigrated, match="could not run kinetod to check the configuration"):
        check_text("", ("/nonexistent/kinetod",))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("mine")
    with pytest.raises(NotWritten, match=f"{path} already exists; use --replace to overwrite it"):
        write_text("yours", path, replace=False, command=TAKES)
    assert path.read_text() == "mine"
    write_text("yours", path, replace=True, command=TAKES)
    assert path.read_text() == "yours"
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("mine")
    link.symlink_to(target)
    os.mkfifo(pipe)
    for path in (link, pipe, Path("/dev/null"), Path("/dev/stdout")):
        with pytest.raises(NotWritten, match=f"{path} is not a regular file; name another file"):
            write_text("yours", path, replace=True, command=TAKES)
    assert (target.read_text(), link.is_symlink(), pipe.is_fifo()) == ("mine", True, True)


def taken_meanwhile(path: Path) -> tuple[str, list[Path]]:
    """What is in the file and in its folder after its name was taken during the check."""
    takes_it = (sys.executable, "-c", f"open({str(path)!r}, 'w').write('mine')")
    with pytest.raises(NotWritten, match="already exists"):
        write_text("yours", path, replace=False, command=takes_it)
    return path.read_text(), list(path.parent.iterdir())


def test_a_disk_without_second_names_is_written_to_and_nothing_there_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "config.toml"
    write_text("yours", path, replace=False, command=TAKES)
    assert path.read_text() == "yours"
    path.unlink()
    assert taken_meanwhile(path) == ("mine", [path])


def test_the_file_is_utf8_whatever_the_locale_is(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    script = (
        "from pathlib import Path; from kinetoctl.dynolog_migration import write_text; "
        f"write_text('# \\xe9\\n', Path({str(path)!r}), replace=False)"
    )
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": IMPORT_PATH}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True)
    assert path.read_bytes() == b"# \xc3\xa9\n"


def test_a_name_that_is_taken_during_the_check_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert taken_meanwhile(path) == ("mine", [path])


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match=f"cannot write {tmp_path}/none/config.toml: No such file"):
        write_text("", tmp_path / "none/config.toml", replace=False, command=TAKES)


# Name and default of every DEFINE_bool, DEFINE_int32 and DEFINE_string in dynolog/src of
# facebookincubator/dynolog@c3a231a, but those of an example program.
DYNOLOGS = {
    "access_token": "",
    "allow_interface_prefixes": "eno,ens,enp,enx,eth",
    "category_id": "",
    "certificate_path": "/etc/ssl/certs/ca-certificates.crt",
    "dcgm_fields": "50,100,155,204,1001,1002,1003,1004,1005,1006,1007,1008,1009,1010,1011,1012",
    "dcgm_lib_path": "/lib64/libdcgm.so",
    "dcgm_major_version": "2",
    "dcgm_reporting_interval_s": "10",
    "dcgm_standalone_address": "",
    "enable_env_var_attribution": "true",
    "enable_gpu_monitor": "false",
    "enable_ipc_monitor": "false",
    "enable_perf_monitor": "false",
    "enable_pod_resources_attribution": "false",
    "enable_tpu_monitor": "false",
    "env_attribution_mappings_file": "",
    "fbrelay_address": "127.0.0.1",
    "fbrelay_port": "10000",
    "filter_nic_interfaces": "false",
    "kernel_monitor_reporting_interval_s": "60",
    "ods_entity_prefix": "",
    "otel_endpoint": "http://localhost:4318",
    "otel_metric_mappings_file": "",
    "otel_resource_attrs": "",
    "otel_resource_env_file": "",
    "otlp_endpoint": "",
    "otlp_headers": "",
    "otlp_max_queue_size": "1000",
    "otlp_service_name": "dynolog",
    "otlp_ssl_ca_cert_path": "",
    "otlp_ssl_client_cert_path": "",
    "otlp_ssl_client_key_path": "",
    "otlp_timeout_ms": "30000",
    "perf_monitor_reporting_interval_s": "60",
    "pod_resources_gpu_resource": "nvidia.com/gpu",
    "pod_resources_socket": "/var/lib/kubelet/pod-resources/kubelet.sock",
    "pod_resources_tpu_resource": "google.com/tpu",
    "port": "1778",
    "prometheus_address": "127.0.0.1",
    "prometheus_port": "8080",
    "scribe_category": "perfpipe_fair_cluster_gpu_stats",
    "tpu_device_plugin_url": "http://localhost:2112/metrics",
    "tpu_reporting_interval_s": "10",
    "tpu_scrape_timeout_ms": "2000",
    "use_JSON": "false",
    "use_ODS": "false",
    "use_fbrelay": "false",
    "use_otel": "false",
    "use_otel_for_kernel_monitor": "false",
    "use_otlp": "false",
    "use_prometheus": "false",
    "use_scuba": "false",
}


def test_every_flag_of_dynolog_is_there_with_its_default() -> None:
    assert {name: flag.default for name, flag in OWN_FLAGS.items()} == DYNOLOGS


def test_switches_are_those_with_a_truth_as_default_and_the_libraries() -> None:
    assert SWITCHES & DYNOLOGS.keys() == {name for name, value in DYNOLOGS.items() if value in ("true", "false")}
    numbers = {name for name, value in DYNOLOGS.items() if value.isdecimal()}
    assert {name for name, flag in FLAGS.items() if flag.kind is FlagKind.NUMBER} == numbers
    assert {"logtostderr", "alsologtostderr", "version"} <= SWITCHES


def test_a_flag_has_a_setting_or_the_reason_why_not() -> None:
    for name, flag in FLAGS.items():
        assert flag.keys if flag.outcome is FlagOutcome.SAME else flag.note, name
        assert flag.note or flag.outcome is FlagOutcome.SAME, name
        assert flag.outcome in (FlagOutcome.SAME, FlagOutcome.APPROXIMATED, FlagOutcome.NO_COUNTERPART), name
        assert not flag.needs or flag.needs in SWITCHES, name
