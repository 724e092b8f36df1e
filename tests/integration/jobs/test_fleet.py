"""`kinetoctl trace --hosts` and `kinetoctl.api` against the daemons of several hosts."""

import gzip
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from campaign.parts.fleet import ABSENT, FAR, UNSTEADY, Fleet, running_fleet
from kinetoctl import api, errors
from support.service.cli import Result, environment, kinetoctl, run_process
from support.service.daemon import Daemon, running_daemon
from support.targets.programs import crunching, program, ready_pids
from support.waiting import scaled, scaled_option, until

pytestmark = pytest.mark.slow

HOSTS, AGENTS = 3, 2
AHEAD_S = 5  # the clock of every second host
SPREAD_NS = 5_000_000
PASSED = re.compile(r"iteration \d+ had already passed: recorded from iteration \d+ on")
LATE, ROUNDED_NS = re.compile(r"recording began ([\d.]+) s after the requested start time"), 1_000_000
RANKS = ("--rank", "all", "--no-attach")  # of the simulated agents, and of nothing else on this machine


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(HOSTS, agents=AGENTS, shifts_s=(0, AHEAD_S)) as started:
        yield started


def trace(fleet: Fleet, folder: Path, *arguments: str) -> Result:
    command = ["trace", "--hosts", str(fleet.hosts_file()), *RANKS, "--output-dir", str(folder), *arguments]
    return run_process(command, environment())


def targets(document: Any) -> list[Any]:
    return [target for host in document["hosts"] if host["capture"] for target in host["capture"]["targets"]]


def verdicts(document: Any) -> dict[int, str]:
    """By rank."""
    return {target["process"]["rank"]: target["verdict"] for target in targets(document)}


def late_ns(document: Any) -> float:
    """By how much the latest process began after the common start, as it says itself: on a busy machine some are."""
    told = (LATE.fullmatch(warning) for target in targets(document) for warning in target["warnings"])
    return max((float(each[1]) * 1e9 + ROUNDED_NS for each in told if each), default=0)


def test_all_ranks_of_all_hosts_are_recorded_over_one_window_and_merged(fleet: Fleet, tmp_path: Path) -> None:
    result = trace(fleet, tmp_path, "--duration", "300ms", "-o", "json")
    assert result.code == 0, result.stderr
    document = result.json()
    assert verdicts(document) == dict.fromkeys(range(HOSTS * AGENTS), "VERDICT_DONE")
    assert document["start_spread_ns"] <= SPREAD_NS + document["clock_uncertainty_ns"] + late_ns(document)
    offsets = [round(host["clock"]["offset_ns"] / 1e9) for host in document["hosts"]]
    assert offsets == [0, -AHEAD_S, 0]
    assert len(list(Path(document["folder"]).iterdir())) == HOSTS * AGENTS
    merged = document["merged"]
    assert [rank["rank"] for rank in merged["ranks"]] == list(range(HOSTS * AGENTS))
    with gzip.open(merged["path"], "rt") as stream:
        events = json.load(stream)["traceEvents"]
    begins = [event["ts"] for event in events if event.get("ph") == "X"]
    # µs: the clock that is ahead was set right
    assert begins and max(begins) - min(begins) < 1e6 + late_ns(document) / 1e3
    shown = run_process(["captures", "show", document["id"], "--hosts", str(fleet.hosts_file())], environment())
    assert shown.code == 0 and shown.stdout.count(" DONE ") == HOSTS * AGENTS


def test_a_capture_by_iteration_records_the_same_ones_everywhere(fleet: Fleet, tmp_path: Path) -> None:
    command = ("--iterations", "2", "--no-fetch", "--idempotency-key", "once", "-o", "json")
    result = trace(fleet, tmp_path, *command)
    assert result.code == 0, result.stderr
    document = result.json()
    assert verdicts(document) == dict.fromkeys(range(HOSTS * AGENTS), "VERDICT_DONE")
    # Those that were late for the common one say so; on a busy machine there are some.
    told = [warning for target in targets(document) for warning in target["warnings"]]
    assert [warning for warning in told if not PASSED.fullmatch(warning)] == []
    assert told or len({target["summary"]["first_iteration"] for target in targets(document)}) == 1
    assert document["folder"] is None
    again = trace(fleet, tmp_path, *command).json()  # the same captures, not new ones; their answers may have come
    made, found = ([{**host["capture"], "answer": None} for host in each["hosts"]] for each in (document, again))
    assert found == made
    fetch = ["captures", "fetch", document["id"], "--hosts", str(fleet.hosts_file()), "--output-dir", str(tmp_path)]
    fetched = run_process(fetch, environment())
    assert fetched.code == 0, fetched.stderr
    folder = tmp_path / f"kineto-{document['id']}"
    assert len(list(folder.iterdir())) == HOSTS * AGENTS
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, f"{folder.name}.json.gz"}


def test_ctrl_c_stops_on_every_host_and_keeps_what_was_recorded(fleet: Fleet, tmp_path: Path) -> None:
    command = kinetoctl("trace", "--hosts", str(fleet.hosts_file()), *RANKS, "--duration", "60s")
    process = subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = ""
    while seen.count("COLLECT") < HOSTS * AGENTS:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=scaled(30))
    assert process.returncode == 130
    listed = run_process(["captures", "list", "--limit", "1", "--hosts", str(fleet.hosts_file())], environment())
    assert listed.stdout.count("PARTIAL") == HOSTS
    folder, merged = sorted(tmp_path.iterdir())
    assert merged.name == f"{folder.name}.json.gz"
    assert len(list(folder.iterdir())) == HOSTS * AGENTS


def test_ps_lists_the_processes_of_all_hosts(fleet: Fleet) -> None:
    command = ["ps", "--hosts", str(fleet.hosts_file()), "--host", "unix:/nowhere", "--rank", "0,5", "-o", "json"]
    result = run_process(command, environment())
    found = [(each["host"], each["rank"]) for each in result.json() if each["agent_state"] == "AGENT_STATE_READY"]
    assert found == [("node000", 0), ("node002", 5)]
    assert "unix:/nowhere: no daemon at unix:/nowhere" in result.stderr
    assert result.code == 4


def test_a_program_captures_waits_fetches_and_reports(fleet: Fleet, tmp_path: Path) -> None:
    capture = api.capture(
        api.Selection(ranks=(api.ANY_RANK,)),
        api.CaptureOptions(
            at=[api.Place(host.name, host.address) for host in fleet.hosts],
            duration_s=0.2,
            labels={"why": "test"},
            attach=False,
        ),
    )
    result = capture.wait(timeout_s=60)
    assert result.done and len(result.processes) == HOSTS * AGENTS
    files = capture.fetch(tmp_path)
    assert files.merged is not None and files.uncertainty_ns is not None and not files.problems
    assert len(list(files.folder.iterdir())) == HOSTS * AGENTS
    assert {row["rank"] for row in capture.report("overview")} == set(range(HOSTS * AGENTS))


def test_a_start_that_is_too_near_is_refused_and_nothing_stays_armed(fleet: Fleet, tmp_path: Path) -> None:
    result = trace(fleet, tmp_path, "--start-at", "+500ms")
    assert result.code == 2
    assert "too soon: even with the processes ready, the hosts need" in result.stderr
    listed = run_process(["captures", "list", "--limit", "1", "--hosts", str(fleet.hosts_file())], environment())
    assert listed.stdout.count("CANCELLED") == HOSTS


def test_a_program_gets_an_error_if_nothing_can_begin(fleet: Fleet) -> None:
    at = [api.Place(host.name, host.address) for host in fleet.hosts]
    with pytest.raises(errors.Refused, match="node000: no process"):
        api.capture(api.Selection(command_regex="^nothing is called so$"), api.CaptureOptions(at=at))


@pytest.fixture(scope="module")
def broken() -> Iterator[Fleet]:
    """Hosts of even numbers share a process, and those of odd numbers another one, of which the first is fine."""
    with running_fleet(5, agents=1, broken={2: UNSTEADY, 3: ABSENT, 4: FAR}, shifts_s=(0, AHEAD_S)) as started:
        yield started


def of(fleet: Fleet, *numbers: int) -> str:
    """These hosts alone, as a list."""
    return ",".join(fleet.hosts[number].address for number in numbers)


def test_the_others_go_on_when_hosts_are_absent_or_lie_about_their_clocks(broken: Fleet, tmp_path: Path) -> None:
    result = trace(broken, tmp_path, "--duration", "200ms", "-o", "json")
    assert result.code == 4
    document = result.json()
    done = {rank for rank, verdict in verdicts(document).items() if verdict == "VERDICT_DONE"}
    assert done == {0, 1}
    why = {host["host"]: host["error"] for host in document["hosts"]}
    assert why["node000"] is why["node001"] is None
    assert "its clock moved by" in why["node002"]
    assert "no such socket" in why["node003"]
    assert "start_time_ns" in why["node004"]


def test_if_all_are_required_nothing_begins(broken: Fleet, tmp_path: Path) -> None:
    command = ["trace", "--hosts", of(broken, 0, 1, 2), *RANKS, "--require", "all", "-o", "json"]
    result = run_process([*command, "--output-dir", str(tmp_path)], environment())
    assert result.code == 5
    assert result.json()["not_begun"].startswith("only 2 of 3 hosts have all their processes ready")
    assert set(verdicts(result.json()).values()) == {"VERDICT_CANCELLED"}


def test_a_host_that_dies_meanwhile_is_lost_and_the_others_are_done(broken: Fleet, tmp_path: Path) -> None:
    lasts = ("--duration", "5s", "--timeout", scaled_option(5))
    command = ["trace", "--hosts", of(broken, 0, 1), *RANKS, *lasts]
    process = subprocess.Popen(
        kinetoctl(*command, "--output-dir", str(tmp_path), "-o", "json"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = ""
    while seen.count("COLLECT") < 2:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    os.kill(broken.pids[1], signal.SIGKILL)
    stdout, _ = process.communicate(timeout=scaled(60))
    assert process.returncode == 4, stdout
    document = json.loads(stdout)
    assert verdicts(document) == {0: "VERDICT_DONE", 1: "VERDICT_UNSPECIFIED"}
    assert [len(host["lost_pids"]) for host in document["hosts"]] == [0, 1]


def await_agent(daemon: Daemon, pid: int) -> None:
    stub = daemon.stub()
    until(lambda: pid in ready_pids(stub), "the agent is connected")


def test_real_agents_under_two_daemons_are_traced_together(tmp_path: Path) -> None:
    with ExitStack() as stack:
        daemons = [stack.enter_context(running_daemon()) for _ in range(2)]
        children = [stack.enter_context(program(crunching(), daemon, quiet=True)) for daemon in daemons]
        for daemon, child in zip(daemons, children, strict=True):
            await_agent(daemon, child.pid)
        hosts = ",".join(daemon.address for daemon in daemons)
        command = ["trace", "--hosts", hosts, "--command", "crunch_numbers", "--no-attach", "--duration", "300ms"]
        result = run_process([*command, "--output-dir", str(tmp_path), "-o", "json"], environment())
    assert result.code == 0, result.stderr
    document = result.json()
    assert [target["pid"] for target in targets(document)] == [child.pid for child in children]
    assert document["start_spread_ns"] <= SPREAD_NS + document["clock_uncertainty_ns"] + late_ns(document)
    assert len(document["merged"]["ranks"]) == 2
