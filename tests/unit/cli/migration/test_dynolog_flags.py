"""The table has every flag that Dynolog has, with its default, and says what becomes of it."""

from kinetoctl.migration.dynolog_flags import FLAGS, OWN_FLAGS, SWITCHES, FlagKind, FlagOutcome

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
