"""What becomes of Dynolog's flags: settings of kinetod, and a true report of each."""

import pytest
from kinetoctl.migration.dynolog_flags import FLAGS, FlagOutcome
from kinetoctl.migration.dynolog_settings import Migrated, migrated, toml_value
from kinetoctl.migration.flag_text import GivenFlag

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
        "nor in Dynolog without --use_prometheus",
    )
    assert outcome(of(use_prometheus="1", prometheus_port="9"), "prometheus_port") == ("same", "")


def test_what_is_off_in_both_is_the_same() -> None:
    assert outcome(of(use_otlp="false"), "use_otlp") == ("same", "")
    assert outcome(of(use_otlp="true"), "use_otlp")[0] == "no counterpart"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("port", "many", "'many' is not a whole number of 32 bits"),
        ("port", "4294967296", "is not a whole number of 32 bits"),
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
        (GivenFlag(name="use_JSON ", value=None, where="x"), "--use_JSON", "no effect", "blanks behind its name"),
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
    assert outcome(found, "allow_interface_prefixes") == ("approximated", "all interfaces; Dynolog then has none")


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
