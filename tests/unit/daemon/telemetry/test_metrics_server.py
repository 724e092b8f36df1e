"""The HTTP endpoint, and what is read when somebody scrapes."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from kinetod.base.errors import StartError
from kinetod.config.addresses import ListenAddress
from kinetod.gpus.gpu_owners import GpuContainer
from kinetod.gpus.gpu_types import GpuActivity, GpuProcess, GpuState, LibraryState, Snapshot, VendorLibrary
from kinetod.permissions.caller_limits import RequestRate
from kinetod.supervise.thread_deadline import WithinDeadline
from kinetod.telemetry import host_sample, metrics_server
from kinetod.telemetry.gpu_metrics import GpuCollector, present
from kinetod.telemetry.host_sample import HostCollector
from kinetod.telemetry.metrics_server import MAX_CONNECTIONS, DaemonCollector, DaemonState, MetricsServer
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from support.waiting import scaled, until

LOOPBACK = ListenAddress(host="127.0.0.1", port=0)


@pytest.fixture(autouse=True)
def _stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "POLL_S", 0.01)


@pytest.fixture(autouse=True)
def _measured_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sample, "DEADLINE_S", scaled(20))


@contextlib.contextmanager
def serving(*collectors: Collector, healthy: Callable[[], bool] = lambda: True) -> Iterator[MetricsServer]:
    server = MetricsServer(LOOPBACK, collectors, healthy=healthy)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def ask(server: MetricsServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Status, type and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()


@pytest.mark.parametrize("path", ["/metrics", "/health", "/"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9417", "127.0.0.1.evil.example", "localhost.evil", "[::1", "1.2.3.4,a"]
)
def test_a_name_that_a_page_of_the_web_had_point_here_is_not_served(path: str, host: str) -> None:
    with serving() as server:
        status, kind, text = ask(server, path, Host=host)
    assert (status, kind) == (421, "text/plain; charset=utf-8")
    assert text == "request this host by its address or as localhost\n"


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "[::1]:9417", "10.0.0.7", "LOCALHOST", ""])
def test_an_address_of_this_host_and_a_forwarded_port_are_served(host: str) -> None:
    with serving() as server:
        assert ask(server, "/health", Host=host.format(port=server.port))[0] == 200


def test_where_other_hosts_may_ask_they_do_so_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "is_loopback", lambda _host: False)
    with serving() as server:
        assert ask(server, "/health", Host="gpu-7.cluster:9417")[0] == 200


def test_metrics_come_as_the_scraper_asks() -> None:
    with serving() as server:
        status, kind, body = ask(server, "/metrics")
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        names = {family.name for family in text_string_to_metric_families(body)}
        assert {"kineto_build_info", "kineto_captures", "process_cpu_seconds"} <= names
        assert "_created" not in body
        assert "openmetrics" in ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")[1]


@pytest.mark.parametrize(("healthy", "status", "said"), [(True, 200, "SERVING"), (False, 503, "NOT_SERVING")])
def test_health_is_the_daemons(healthy: bool, status: int, said: str) -> None:
    with serving(healthy=lambda: healthy) as server:
        found, kind, body = ask(server, "/health")
        assert (found, kind) == (status, "application/json")
        assert f'"{said}"' in body


def test_an_answer_is_whole_after_a_shorter_one() -> None:
    states = [True, False]
    with serving(healthy=lambda: states.pop(0)) as server:
        answers = [json.loads(ask(server, "/health")[2])["status"] for _ in range(2)]
    assert answers == ["SERVING", "NOT_SERVING"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/metrics/../etc/passwd", 404), ("POST", "/metrics", 405), ("HEAD", "/health", 200)],
)
def test_there_is_nothing_else(method: str, path: str, status: int) -> None:
    with serving() as server:
        assert ask(server, path, method)[0] == status


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with (
        serving() as server,
        pytest.raises(StartError, match=r"127\.0\.0\.1:\d+: Address already in use.*metrics.listen"),
    ):
        MetricsServer(ListenAddress(host="127.0.0.1", port=server.port), [], healthy=lambda: True).start()


def test_connections_that_say_nothing_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.2)
    others = set(threading.enumerate())
    with serving() as server, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(MAX_CONNECTIONS * 3)
        ]
        assert len(set(threading.enumerate()) - others) <= MAX_CONNECTIONS + 4
        for each in silent:
            each.settimeout(scaled(20))
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""

        def answered() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return ask(server, "/health")[0] == 200
            return False

        until(answered, "it serves again")


# one user beside another

DRIP = """
import encodings.idna, os, socket, sys, time
os.setresuid(65534, 65534, 65534)
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(64)]
print("held", flush=True)
while True:
    for each in held:
        try: each.sendall(b"G")
        except OSError: pass
    time.sleep(0.05)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user connects")
def test_a_user_who_holds_all_connections_that_there_are_keeps_no_other_out() -> None:
    with serving() as server:
        command = [sys.executable, "-S", "-c", DRIP, str(server.port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            try:
                assert other.stdout.readline() == b"held\n"
                assert ask(server, "/health")[0] == 200
                assert "kineto_build_info" in ask(server, "/metrics")[2]
            finally:
                other.kill()


def test_a_request_that_comes_byte_by_byte_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_S", 0.3)
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as slow:
        cut = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not cut.wait(0.02):
                    slow.sendall(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        slow.settimeout(scaled(20))
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        cut.set()
        thread.join()


def test_who_asks_too_often_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "RequestRate", partial(RequestRate, clock=lambda: 0.0))
    monkeypatch.setattr(metrics_server, "MAX_PER_SECOND", 1)
    refused = 0
    with serving() as server:
        for _ in range(8):
            try:
                assert ask(server, "/health")[0] == 200
            except (OSError, http.client.HTTPException):
                refused += 1
    assert refused == 4  # four may come at once


class Counted(Collector):
    """How often it was asked; answers when `go` is set."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = threading.Event()

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily("asked", "x"), GaugeMetricFamily("other", "x")]

    def collect(self) -> Iterable[Metric]:
        self.asked += 1
        self.go.wait(20)
        return [GaugeMetricFamily("asked", "x", value=self.asked), GaugeMetricFamily("other", "x", value=1)]


def test_scrapes_that_wait_share_one_measurement_and_the_next_gets_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, looks = Counted(), list[float]()

    def monotonic() -> float:
        looks.append(time.monotonic())
        return looks[-1]

    monkeypatch.setattr(metrics_server, "time", SimpleNamespace(monotonic=monotonic))
    registry = metrics_server._Shared(CollectorRegistry())
    registry._registry.register(counted)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(registry.collect)
        until(lambda: counted.asked == 1, "it measures")
        rest = [threads.submit(registry.collect) for _ in range(7)]
        until(lambda: len(looks) == 2 + len(rest), "they have come")  # the first one looked again as it began
        counted.go.set()
        assert first.result()
        assert all(each.result() for each in rest)
    assert counted.asked == 2
    registry.collect()
    assert counted.asked == 3


def test_only_the_samples_that_are_asked_for_come() -> None:
    counted = Counted()
    counted.go.set()
    with serving(counted) as server:
        some = ask(server, "/metrics?name[]=asked&name[]=none")[2]
    assert [line for line in some.splitlines() if not line.startswith("#")] == ["asked 1.0"]


# what is read at a scrape


def samples(collector: Collector) -> dict[tuple[str, ...], float]:
    """(name, label values…) -> value."""
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def declared(collector: Collector) -> set[str]:
    return {family.name for family in collector.describe()}  # type: ignore[attr-defined]  # optional in the base class


def test_the_host_is_measured(tmp_path: Path) -> None:
    found = samples(HostCollector(tmp_path))
    assert found["kineto_collector_up", "host"] == found["kineto_collector_up", "store"] == 1
    assert found["kineto_host_cpu_seconds_total", "user"] > 0
    assert found["kineto_host_memory_total_bytes",] > found["kineto_host_memory_available_bytes",] > 0
    assert found["kineto_store_size_bytes",] >= found["kineto_store_free_bytes",]


def test_a_store_that_is_gone_is_not_up_and_the_host_is(tmp_path: Path) -> None:
    found = samples(HostCollector(tmp_path / "gone"))
    assert (found["kineto_collector_up", "host"], found["kineto_collector_up", "store"]) == (1, 0)
    assert ("kineto_store_free_bytes",) not in found


def gpu(**changes: object) -> GpuState:
    values = {
        "vendor": "nvidia",
        "index": 0,
        "uuid": "GPU-1",
        "name": "H200",
        "device": "nvidia0",
        "pci_bus_id": "0:18",
    }
    return GpuState(**{**values, **changes})  # type: ignore[arg-type]


def of_gpus(*gpus: GpuState, **options: object) -> dict[tuple[str, ...], float]:
    libraries = (
        VendorLibrary(name="nvml", state=LibraryState.OK, driver_version="580", seconds=0.02),
        VendorLibrary(name="amdsmi", state=LibraryState.ABSENT, detail="not installed"),
    )
    return samples(GpuCollector(lambda _: Snapshot(gpus=gpus, libraries=libraries), "node1", **options))  # type: ignore[arg-type]


def test_a_gpu_has_dcgms_labels_and_only_the_figures_that_it_has() -> None:
    processes = (GpuProcess(pid=1), GpuProcess(pid=2))
    state = gpu(utilization=0.5, nvlink_transmit_bytes=7, ecc_corrected=3, xid_errors={79: 2}, processes=processes)
    found = of_gpus(state, owners=lambda _: {"GPU-1": [GpuContainer(pod="p", namespace="n", container="c")]})
    labels = ("0", "GPU-1", "0:18", "nvidia0", "H200", "node1", "p", "n", "c", "")
    assert {key: value for key, value in found.items() if "GPU-1" in key} == {
        ("kineto_gpu_up", *labels): 1,
        ("kineto_gpu_utilization_ratio", *labels): 0.5,
        ("kineto_gpu_nvlink_transmit_bytes_total", *labels): 7,
        ("kineto_gpu_ecc_errors_total", *labels, "corrected"): 3,
        ("kineto_gpu_xid_errors_total", *labels, "79"): 2,
        ("kineto_gpu_processes", *labels): 2,
    }


def test_what_the_units_of_a_gpu_did_are_counters_and_what_is_not_counted_has_none() -> None:
    activity = GpuActivity(since_ns=1, seconds=20.0, totals={"sm_active": 5.0, "pcie_receive": 2048.0})
    found = of_gpus(gpu(activity=activity))
    assert {key[0]: value for key, value in found.items() if "active" in key[0] or "pcie" in key[0]} == {
        "kineto_gpu_sm_active_seconds_total": 5.0,
        "kineto_gpu_pcie_receive_bytes_total": 2048.0,
    }
    assert [value for key, value in found.items() if key[0] == "kineto_gpu_activity_observed_seconds_total"] == [20.0]
    assert not [key for key in of_gpus(gpu()) if "activ" in key[0]]


def test_a_gpu_that_two_containers_share_has_the_names_of_neither() -> None:
    pods = [
        GpuContainer(pod=name, namespace="ml", container_id=name * 64, runtime="cri-o", pod_uid=name) for name in "ab"
    ]
    found = of_gpus(gpu(), owners=lambda _: {"GPU-1": pods})
    known = ("0", "GPU-1", "0:18", "nvidia0", "H200", "node1")
    assert {key: value for key, value in found.items() if "GPU-1" in key} == {
        ("kineto_gpu_up", *known, "", "", "", ""): 1,
        ("kineto_gpu_processes", *known, "", "", "", ""): 0,
        ("kineto_gpu_container_info", *known, "a", "ml", "", "", "a" * 64, "cri-o", "a"): 1,
        ("kineto_gpu_container_info", *known, "b", "ml", "", "", "b" * 64, "cri-o", "b"): 1,
    }


def test_gpus_have_the_job_that_they_were_given_to_and_shared_ones_name_all_apart() -> None:
    gpus = [gpu(index=number, uuid=f"GPU-{number}") for number in range(4)]
    found = of_gpus(*gpus, jobs=lambda: {"0": ("41",), "GPU-1": ("42",), "2.0": ("43",), "2.1": ("44",)})
    up = {key[2]: key[-1] for key in found if key[0] == "kineto_gpu_up"}
    assert up == {"GPU-0": "41", "GPU-1": "42", "GPU-2": "", "GPU-3": ""}
    given = sorted((key[2], key[-1]) for key in found if key[0] == "kineto_gpu_job_info")
    assert given == [("GPU-0", "41"), ("GPU-1", "42"), ("GPU-2", "43"), ("GPU-2", "44")]


def test_a_lost_gpu_is_down_and_nothing_else() -> None:
    found = of_gpus(gpu(works=False))
    assert [key[0] for key, value in found.items() if "GPU-1" in key] == ["kineto_gpu_up"]
    assert 0 in found.values()


def test_libraries_say_whether_they_work() -> None:
    found = of_gpus()
    assert (found["kineto_gpu_library_up", "nvml"], found["kineto_gpu_library_up", "amdsmi"]) == (1, 0)
    assert found["kineto_gpu_driver_info", "nvml", "580"] == 1
    assert ("kineto_gpu_library_duration_seconds", "amdsmi") not in found


def test_gpus_are_counted_without_any_library(tmp_path: Path) -> None:
    for name in ("0000:18:00.0", "0000:19:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    for node, identity in enumerate(("0", "51182", "8311")):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{identity}\n")
    assert present(tmp_path / "proc", tmp_path / "sys") == {"nvidia": 2, "amd": 2, "intel": 0}


def test_agents_are_read_on_the_loop_and_a_loop_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scrape() -> dict[tuple[str, ...], float]:
        state = DaemonState(agents={"READY": 2, "BUSY": 1}, captures_running=1)
        return await asyncio.to_thread(samples, DaemonCollector(asyncio.get_running_loop(), lambda: state))

    with monkeypatch.context() as patient:
        patient.setattr(metrics_server, "DEADLINE_S", scaled(20))
        found = asyncio.run(scrape())
    assert (found["kineto_agents", "READY"], found["kineto_captures_running",]) == (2, 1)
    idle = asyncio.new_event_loop()
    with contextlib.closing(idle):
        stuck = samples(DaemonCollector(idle, lambda: pytest.fail("read off the loop")))
    assert set(stuck) == {("kineto_event_loop_delay_seconds",)}


@pytest.mark.parametrize(
    "collector",
    [HostCollector(Path("/")), GpuCollector(lambda _: Snapshot(gpus=(gpu(power_watts=1.0),)), "h")],
    ids=["host", "gpus"],
)
def test_every_family_is_declared(collector: Collector) -> None:
    families: Iterable[object] = collector.collect()
    assert {family.name for family in families} <= declared(collector)  # type: ignore[attr-defined]


def test_a_call_that_is_late_is_not_made_twice() -> None:
    go, calls = threading.Event(), list[int]()

    def slow() -> int:
        calls.append(1)
        go.wait(20)
        return 7

    within = WithinDeadline("slow", slow)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            within.get(0.01)
    go.set()
    assert within.get(20) == 7
    assert len(calls) <= 2
