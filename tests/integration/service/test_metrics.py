"""Metrics and WatchHost of a real daemon on a host with (fake) GPUs."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.gpus.nvml import IN_MIG_MODE, OFF
from prometheus_client.parser import text_string_to_metric_families
from support.machine.gpus import FakeGpus
from support.service.cli import Result, run_process
from support.service.daemon import Daemon, error_of, running_daemon
from support.waiting import scaled, until

LISTEN, JOBS = "KINETOD_METRICS_LISTEN", "KINETOD_METRICS_GPU_JOBS_DIR"
STATE = (f"process 1 {os.getpid()} 500 33", "metric 2 62", "metric 5 41")
SLURM = Path(__file__).parents[3] / "deploy/slurm"


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> FakeGpus:
    gpus = FakeGpus(tmp_path_factory.mktemp("gpus"))
    gpus.say(*STATE)
    return gpus


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that says which job has which GPU."""
    return tmp_path_factory.mktemp("jobs") / "map"


@pytest.fixture(scope="module")
def daemon(gpus: FakeGpus, jobs: Path) -> Iterator[Daemon]:
    with running_daemon(environ={**gpus.environ, LISTEN: "127.0.0.1:0", JOBS: str(jobs)}) as started:
        yield started


def page(daemon: Daemon, name: str = "metrics") -> str:
    found = re.search(r"metrics on http://(127\.0\.0\.1:\d+)/metrics", daemon.log())
    assert found, daemon.log()
    with urllib.request.urlopen(f"http://{found[1]}/{name}", timeout=scaled(20)) as answer:
        text: str = answer.read().decode()
    return text


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values by the labels' names…) -> value."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def whole_page(daemon: Daemon) -> dict[tuple[str, ...], float]:
    """The samples of a scrape that had all in its time, which is short."""

    def whole() -> dict[tuple[str, ...], float] | None:
        found = samples(page(daemon))
        has_all = ("kineto_agents", "READY") in found and found["kineto_collector_up", "host"]
        return found if has_all and found["kineto_gpu_library_up", "nvml"] else None

    return until(whole, "all was measured in time", pause_s=0.5)


def test_a_scrape_has_the_daemon_the_host_and_the_gpus(daemon: Daemon) -> None:
    daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(20))
    found = whole_page(daemon)
    assert found["kineto_grpc_requests_total", "OK", "GetHost"] >= 1
    assert found["kineto_agents", "READY"] == 0
    assert [value for key, value in found.items() if key[0] == "kineto_gpu_power_watts"] == [512.345, 512.345]


def test_a_gpu_has_the_job_of_slurms_prolog_until_its_epilog(daemon: Daemon, jobs: Path) -> None:
    def script(name: str) -> None:
        environ = {"SLURM_JOB_ID": "4242", "SLURM_JOB_GPUS": "1"}
        subprocess.run([str(SLURM / name), str(jobs)], env=environ, check=True)

    def labels() -> list[tuple[str, str]]:
        families = text_string_to_metric_families(page(daemon))
        up = (each.labels for family in families if family.name == "kineto_gpu_up" for each in family.samples)
        return [(each["gpu"], each["hpc_job"]) for each in up]

    def until_labelled(*wanted: tuple[str, str]) -> None:
        until(lambda: labels() == list(wanted), f"the labels are {wanted}", state=labels, pause_s=0.5)

    script("Prolog")
    until_labelled(("0", ""), ("1", "4242"))
    script("Epilog")
    until_labelled(("0", ""), ("1", ""))


def test_a_refused_call_is_counted_by_its_code(daemon: Daemon) -> None:
    code, _, _ = error_of(lambda: daemon.stub().GetCapture(pb.GetCaptureRequest(id="nothing"), timeout=scaled(20)))
    assert code is grpc.StatusCode.NOT_FOUND
    until(
        lambda: samples(page(daemon)).get(("kineto_grpc_requests_total", "NOT_FOUND", "GetCapture")),
        "the call is counted",
    )


def test_health_is_served(daemon: Daemon) -> None:
    assert '"status": "SERVING"' in page(daemon, "health")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_promtool_finds_no_fault_with_the_metrics(daemon: Daemon) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page(daemon), capture_output=True, text=True, check=False
    )
    assert [line for line in done.stderr.splitlines() if "camelCase" not in line] == []  # modelName is DCGM's label


@pytest.mark.slow
def test_a_driver_that_hangs_costs_a_scrape_its_gpus_only(gpus: FakeGpus, daemon: Daemon) -> None:
    def without_gpus() -> dict[tuple[str, ...], float] | None:
        found = samples(page(daemon))
        return (
            found if (found["kineto_gpu_library_up", "nvml"], found["kineto_collector_up", "host"]) == (0, 1) else None
        )

    gpus.say("hang 1")
    try:
        found = until(without_gpus, "the driver hangs")
        assert not [key for key in found if key[0] == "kineto_gpu_power_watts"]
        assert daemon.stub().ListCaptures(pb.ListCapturesRequest(), timeout=scaled(20)).captures == []
    finally:
        gpus.say(*STATE)
    until(lambda: samples(page(daemon))["kineto_gpu_library_up", "nvml"], "the driver works again")


def test_who_watches_sees_gpus_and_the_processes_on_them(daemon: Daemon) -> None:
    def has_all(sample: pb.HostSample) -> bool:
        """Not so after a reading of the GPUs that was late."""
        return any(each.gpus for each in sample.processes) and sample.gpus[0].tensor_active > 0

    request = pb.WatchHostRequest(interval_ns=500_000_000)
    stream = daemon.stub().WatchHost(request, timeout=60)
    first = next(stream)
    second = next(sample for sample in stream if has_all(sample))
    stream.cancel()
    assert second.time_ns > first.time_ns
    assert [gpu.device for gpu in second.gpus] == ["nvidia0", "nvidia1"]
    assert (second.gpus[0].sm_active, second.gpus[0].tensor_active) == (pytest.approx(0.62), pytest.approx(0.41))
    assert second.gpus[0].nvlink_receive_bytes_per_second == pytest.approx(60 << 20)
    assert second.gpus[0].pcie_transmit_bytes_per_second == pytest.approx(20 << 20)
    (process,) = (each for each in second.processes if each.gpus)  # others on this machine may train without a GPU
    assert (process.process.pid, process.gpus[0].gpu, process.gpus[0].memory_bytes) == (os.getpid(), 1, 500 << 20)
    assert process.memory_bytes > 0
    assert 0 <= second.cpu_busy <= 1
    assert second.memory_total_bytes > second.memory_available_bytes > 0


@pytest.mark.parametrize("interval_ns", [-1, 1, 10**18])
def test_an_interval_out_of_range_is_refused(daemon: Daemon, interval_ns: int) -> None:
    request = pb.WatchHostRequest(interval_ns=interval_ns)
    code, reason, message = error_of(lambda: daemon.stub().WatchHost(request, timeout=20))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert message.startswith("interval_ns: must be between")


def test_there_are_not_watchers_without_end(daemon: Daemon) -> None:
    request = pb.WatchHostRequest(interval_ns=3600 * 10**9)
    streams = [daemon.stub().WatchHost(request, timeout=60) for _ in range(41)]  # root has the reserve, too
    ends = until(lambda: [stream.code() for stream in streams if stream.done()], "one is refused")
    for stream in streams:
        stream.cancel()
    assert ends == [grpc.StatusCode.RESOURCE_EXHAUSTED]


def test_top_shows_the_host(daemon: Daemon) -> None:
    rows = (r"^1    NVIDIA H200  86%   62%  41%     10%   43%", rf"^{os.getpid()} .* 500\.0 MiB  33% ")

    def shown() -> Result | None:
        done = run_process(["top", "--once"], daemon.client_environ())
        return done if all(re.search(row, done.stdout, re.MULTILINE) for row in rows) else None

    done = until(shown, "the GPUs were read in time")
    assert (done.code, done.stderr) == (0, "")


def activity_checks(daemon: Daemon) -> list[str]:
    checks = daemon.stub().DiagnoseHost(pb.DiagnoseHostRequest(), timeout=scaled(30)).checks
    return [check.detail for check in checks if check.name == "gpu_activity"]


def test_doctor_says_of_which_gpus_the_units_are_counted(gpus: FakeGpus, daemon: Daemon) -> None:
    until(lambda: activity_checks(daemon) == ["GPU unit activity is measured: GPU 0, 1"], "both are counted")
    gpus.say("mig 1")
    try:
        found = until(lambda: activity_checks(daemon)[1:], "one of them is in MIG mode")
    finally:
        gpus.say(*STATE)
    assert found == [f"GPU unit activity is not measured ({IN_MIG_MODE}): GPU 1"]


def test_a_daemon_that_is_told_not_to_count_does_not(gpus: FakeGpus) -> None:
    with running_daemon(environ={**gpus.environ, "KINETOD_METRICS_GPU_ACTIVITY": "false"}) as daemon:
        said = f"GPU unit activity is not measured ({OFF}): GPU 0, 1"
        until(lambda: activity_checks(daemon) == [said], "the GPUs were read in time and it is said")


def test_on_request_dynologs_names_are_on_the_page_and_in_lines_of_json(gpus: FakeGpus, tmp_path: Path) -> None:
    path = tmp_path / "metrics.log"
    settings = {"COMPAT": "dynolog", "JSON_LOG": str(path), "HOST_INTERVAL": "1s", "GPU_INTERVAL": "1s"}
    environ = {f"KINETOD_METRICS_{name}": value for name, value in settings.items()}

    def lines() -> list[dict[str, object]]:
        return [json.loads(line.partition(" data = ")[2]) for line in path.read_text().splitlines()]

    def values(daemon: Daemon) -> dict[tuple[str, ...], float] | None:
        """They are left out when they are older than two intervals."""
        found = samples(page(daemon))
        return found if {"uptime", "cpu_util", "rx_bytes"} <= {key[0] for key in found} else None

    with running_daemon(environ={**gpus.environ, LISTEN: "127.0.0.1:0", **environ}) as daemon:
        until(lambda: any("cpu_util" in line for line in lines()), "an interval of the host has ended")
        until(lambda: {line.get("device") for line in lines()} >= {0, 1}, "both GPUs have a line")
        until(lambda: any("tensorcore_active" in line for line in lines()), "an interval of a GPU has ended")
        found = until(lambda: values(daemon), "the values of the last interval are on the page", pause_s=0.5)
        host = next(key[1] for key in found if key[0] == "uptime")
        assert found["uptime", host] > 0
        assert 0 <= found["cpu_util", host] <= 100
        assert found["rx_bytes", host, "lo"] >= 0
        assert whole_page(daemon)
    of_gpus = [line for line in lines() if "device" in line]
    assert {line["gpu_power_draw"] for line in of_gpus} == {"512.345"}
    assert {line.get("tensorcore_active") for line in of_gpus} == {None, "0.410"}
