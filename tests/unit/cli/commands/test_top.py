"""`kinetoctl top` against a scripted daemon."""

import json
from collections.abc import Iterator

import pytest
import yaml
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.top_view import ORDERS, ordered, render
from rich.console import Console
from support.service import captures
from support.service.cli import Run
from support.service.fake_profiler import FakeProfiler, FakeServer, serve

GIB = 1 << 30


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serve(FakeProfiler(host_samples=[sample(), sample()])) as running:
        yield running


def gpu(index: int) -> pb.GpuSample:
    return pb.GpuSample(
        gpu=pb.Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA H200", memory_bytes=140 * GIB),
        vendor="nvidia",
        works=True,
        utilization=0.87,
        memory_utilization=0.4,
        memory_used_bytes=70 * GIB,
        power_watts=512.4,
        power_limit_watts=700,
        temperature_celsius=61,
        sm_clock_hertz=1.98e9,
        sm_active=0.62,
        tensor_active=0.41,
        dram_active=0.155,
        pcie_transmit_bytes_per_second=1 << 20,
        pcie_receive_bytes_per_second=2 << 20,
    )


def sample() -> pb.HostSample:
    lost = pb.GpuSample(gpu=pb.Gpu(index=1, name="NVIDIA H200"), vendor="nvidia")
    trained = pb.ProcessSample(process=captures.process(), cpu=1.5, memory_bytes=3 * GIB)
    trained.process.busy_capture_id = "20260101-1"
    trained.process.iteration_ns = 125_000_000
    trained.gpus.add(gpu=0, vendor="nvidia", memory_bytes=70 * GIB, utilization=0.8)
    other = pb.ProcessSample(
        process=pb.Process(pid=7, uid=1001, command=["top\x1b[2J"], agent_state=pb.AGENT_STATE_NONE, iterations=-1),
        cpu=2,
    )
    return pb.HostSample(
        hostname="node1",
        version="1.0",
        cpus=8,
        cpu_busy=0.5,
        cpu_iowait=0.25,
        load_1m=3.25,
        memory_total_bytes=64 * GIB,
        memory_available_bytes=48 * GIB,
        disk_read_bytes_per_second=1 << 20,
        network_receive_bytes_per_second=512,
        store_free_bytes=10 * GIB,
        agents=1,
        captures_running=1,
        gpus=[gpu(0), lost],
        gpu_libraries=[
            pb.GpuLibrary(name="nvml", state="ok"),
            pb.GpuLibrary(name="amdsmi", state="absent", detail="AMD SMI is not installed"),
        ],
        processes=[other, trained],
    )


def test_one_sample_is_a_picture_of_host_gpus_and_processes(server: FakeServer, run: Run) -> None:
    first, *rest = run("top", "--once").stdout.splitlines()
    assert first.startswith("node1  ")
    assert first.endswith("  kinetod 1.0  agents 1  captures 1")
    assert rest == [
        "cpu 50% of 8, waiting for disks 25%, load 3.2   memory 16.0 GiB of 64.0 GiB",
        "disk read 1.0 MiB/s write 0 B/s   network in 512 B/s out 0 B/s   store free 10.0 GiB",
        "",
        "GPU  NAME         UTIL  SM   TENSOR  DRAM  MEM  MEMORY                POWER        TEMP   SM CLOCK  "
        "PCIE RX/TX             NVLINK RX/TX  PROC",
        "0    NVIDIA H200  87%   62%  41%     16%   40%  70.0 GiB / 140.0 GiB  512 / 700 W  61 °C  1980 MHz  "
        "2.0 MiB/s / 1.0 MiB/s  -             1",
        "1    NVIDIA H200  LOST  -    -       -     -    -                     -            -      -         "
        "-                      -             -",
        "",
        "PID   USER  RANK  JOB  GPU  GPU MEM   GPU UTIL  CPU   RSS      AGENT  CAPTURE     ITER  ITER/S  COMMAND",
        "4242  ada   0     -    0    70.0 GiB  80%       150%  3.0 GiB  READY  20260101-1  120   8       "
        "python train.py --epochs 3",
        "7     1001  -     -    -    -         -         200%  0 B      NONE   -           -     -       top\\x1b[2J",
    ]
    assert server.profiler.requests[0].interval_ns == 2_000_000_000


def test_json_once_is_one_document_and_otherwise_a_line_for_each_sample(run: Run) -> None:
    once = run("top", "--once", "-o", "json").json()
    assert [each["process"]["pid"] for each in once["processes"]] == [4242, 7]
    assert once["gpus"][1]["utilization"] is None
    lines = run("top", "-o", "json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [once, once]


def test_yaml_has_a_document_for_each_sample(run: Run) -> None:
    first, second = list(yaml.safe_load_all(run("top", "-o", "yaml").stdout))
    assert first == second
    assert first["hostname"] == "node1"


@pytest.mark.parametrize(
    ("order", "reverse", "pids"),
    [("gpu", False, [4242, 7]), ("cpu", False, [7, 4242]), ("cpu", True, [4242, 7]), ("pid", False, [7, 4242]),
     ("pid", True, [4242, 7]), ("rank", False, [4242, 7]), ("memory", False, [4242, 7])],
)  # fmt: skip
def test_processes_are_sorted_as_asked(order: str, reverse: bool, pids: list[int]) -> None:
    assert [each.process.pid for each in ordered(sample().processes, order, reverse=reverse)] == pids


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_takes_every_process(order: str) -> None:
    assert len(ordered(sample().processes, order)) == 2


def shown(width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(sample(), order="gpu", width=width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_narrow_terminal_leaves_out_empty_columns_then_others_and_cuts_the_command() -> None:
    lines = shown(80)
    assert "GPU  NAME         UTIL  TENSOR  MEMORY                POWER        TEMP   PROC" in lines
    assert "PID   USER  RANK  GPU  GPU MEM   GPU UTIL  CPU   AGENT  ITER  ITER/S  COMMAND" in lines
    assert "4242  ada   0     0    70.0 GiB  80%       150%  READY  120   8       python tr…" in lines


def test_without_gpus_the_reason_is_told_once() -> None:
    host = pb.HostSample(hostname="h")
    for name in ("nvml", "amdsmi"):
        host.gpu_libraries.add(name=name, state="late", detail="the driver did not answer within 1.5 s")
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(render(host, order="gpu"))
    assert capture.get().count("GPUs: the driver did not answer within 1.5 s") == 1


def test_an_interval_that_is_too_short_is_refused(run: Run) -> None:
    result = run("top", "--interval", "100ms")
    assert (result.code, result.stdout) == (2, "")
    assert "between 500ms and 1h" in result.stderr


def test_pods_have_a_column_where_their_names_are_known() -> None:
    known, console = sample(), Console(width=200, color_system=None)
    process = known.processes[0].process
    for process.pod_namespace, process.pod_name, expected in (("ml", "llama-0", True), ("", "", False)):
        with console.capture() as capture:
            console.print(render(known, order="gpu", width=None))
        text = capture.get()
        assert ("POD" in text, "ml/llama-0" in text) == (expected, expected)
