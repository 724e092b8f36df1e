"""What is shown of a capture of many hosts while it runs."""

import io
import time

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.fleet.host_run import HostRun
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import Unreachable
from kinetoctl.output.capture_progress import FleetLines, FleetTable, show_fleet
from rich.console import Console
from rich.live import Live
from support.service import captures


def member(host: str, *states: pb.TargetState) -> HostRun:
    targets = (captures.target(4000 + number, state=state) for number, state in enumerate(states))
    return HostRun(Place(host, f"{host}:50051"), captures.capture(*targets))


def shown(*members: HostRun) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    with Live(console=console, auto_refresh=False) as live:
        table = FleetTable(live, members)
        with console.capture() as text:
            console.print(table)
    return [" ".join(line.split()) for line in text.get().splitlines()]


def test_few_processes_have_a_line_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    lines, host = FleetLines(), member("n0", pb.TARGET_STATE_PENDING, pb.TARGET_STATE_PENDING)
    lines.update(host)
    host.targets[0].state = pb.TARGET_STATE_COLLECT
    lines.update(host)
    lines.update(host)
    host.error = Unreachable("gone")
    lines.update(host)
    assert capsys.readouterr().err.splitlines() == [
        "n0 pid 4000, rank 0: COLLECT",
        "n0 pid 4000, rank 0: UNKNOWN HOST_LOST",
    ]


def test_many_processes_have_a_line_a_second_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = time.monotonic()
    lines = FleetLines(clock=lambda: now_s)
    hosts = [member(f"n{number}", *[pb.TARGET_STATE_COLLECT] * 9) for number in range(3)]
    for host in hosts:
        lines.update(host)
    now_s += 2
    hosts[0].targets[0].state = pb.TARGET_STATE_STORE
    lines.update(hosts[0])
    printed = capsys.readouterr().err.splitlines()
    assert printed[9:] == ["18 COLLECT", "26 COLLECT, 1 STORE"]


def test_a_terminal_shows_few_processes_each() -> None:
    assert shown(member("n0", pb.TARGET_STATE_WARMUP), member("n1", pb.TARGET_STATE_COLLECT)) == [
        "1 COLLECT, 1 WARMUP, 0.0 s",
        "HOST TARGET STATE FOR RECORDS BYTES DROPPED",
        "n0 pid 4000, rank 0 WARMUP 0.0 s 0 0 B 0",
        "n1 pid 4000, rank 0 COLLECT 0.0 s 0 0 B 0",
    ]


def test_a_terminal_shows_of_many_how_many_of_each_host_are_where() -> None:
    hosts = [member(f"n{number}", *[pb.TARGET_STATE_COLLECT] * 8) for number in range(50)]
    failed = HostRun(Place("n50", "n50:1"), error=Unreachable("gone"))
    found = shown(*hosts, failed)
    assert found[:3] == ["400 COLLECT, 0.0 s", "HOST PROCESSES", "n0 8 COLLECT"]
    assert found[-1] == "… 11 more hosts"
    assert shown(failed, *hosts)[2] == "n50 FAILED"


def ended(pid: int) -> pb.Target:
    target = captures.done_target(pid)
    target.collecting_ns, target.collected_ns = 10**9, 31 * 10**9
    target.counts.add(source="cupti", records=1_000, bytes=1 << 20, dropped=3)
    return target


def test_a_log_says_of_each_process_and_of_many_together_what_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    capture = captures.capture(ended(4000))
    capture.spec.duration_ns = 30 * 10**9
    FleetLines().update(HostRun(Place("n0", "n0:1"), capture))
    FleetLines().update(HostRun(Place("n0", "n0:1"), captures.capture(*map(ended, range(4000, 4020)))))
    assert capsys.readouterr().err.splitlines() == [
        "n0 pid 4000, rank 0: DONE, 30.0 s of 30 s, 1,000 records, 1.0 MiB, 3 dropped",
        "20 DONE, 20,000 records, 20.0 MiB, 60 dropped",
    ]


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with show_fleet([], quiet=True, color=False) as progress:
        progress.note("n0 is ready")
        progress.update(member("n0", pb.TARGET_STATE_COLLECT))
        progress.fetched(1, 1, 1)
    assert capsys.readouterr() == ("", "")
