"""Captures of kinetoctl.api as context managers, with and without an event loop, against the daemons of two hosts."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign.parts.fleet import Fleet, running_fleet
from kinetoctl import api, errors
from kinetoctl.client.fleet.fleet_run import FleetRun
from support.service.cli import environment, run_process
from support.waiting import scaled

HOSTS, AGENTS = 2, 1
EVERYBODY = api.Selection(ranks=(api.ANY_RANK,))
SHORT_S, LONG_S = 0.2, 120.0
PROGRAM = """
import asyncio, signal, threading
from kinetoctl import api

signal.signal(signal.SIGINT, signal.default_int_handler)
options = api.CaptureOptions(at=[api.Place(*each) for each in {places}], duration_s={duration_s}, attach=False)

def work():
    before = signal.getsignal(signal.SIGINT)
    with api.capture(api.Selection(ranks=(api.ANY_RANK,)), options) as capture:
        pass
    verdicts = [process.verdict for process in capture.result().processes]
    print("TRACED", signal.getsignal(signal.SIGINT) is before, *verdicts)

async def main():
    work()

def left():
    print("LEFT", signal.getsignal(signal.SIGINT) is signal.default_int_handler)

"""
IPYTHON = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell(user_ns=globals())
shell.run_line_magic("autoawait", "asyncio")
shell.run_cell("work()\\nawait asyncio.sleep(0)").raise_error()
left()
"""
PYTEST_ASYNCIO = """
import pytest
@pytest.mark.asyncio
async def test_work():
    work()
def test_left():
    left()
"""
WAYS = {  # what calls `work`, by what that needs
    "": "work(); left()",
    "asyncio": "asyncio.run(main()); left()",
    "threading": "thread = threading.Thread(target=work); thread.start(); thread.join(); left()",
    "uvloop": "import uvloop; uvloop.run(main()); left()",
    "IPython": IPYTHON,
    "pytest_asyncio": PYTEST_ASYNCIO,
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(HOSTS, agents=AGENTS) as started:
        yield started


def options(fleet: Fleet, duration_s: float) -> api.CaptureOptions:
    places = [api.Place(host.name, host.address) for host in fleet.hosts]
    return api.CaptureOptions(at=places, duration_s=duration_s, attach=False)


def verdicts(capture: api.Capture | api.AsyncCapture) -> list[str]:
    return [process.verdict for process in capture.result().processes]


def test_a_block_that_an_exception_leaves_cancels_its_capture(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught, api.capture(EVERYBODY, options(fleet, LONG_S)) as capture:
        _ = 1 / 0
    assert verdicts(capture) == ["CANCELLED"] * HOSTS * AGENTS
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(errors.NotFound):
        capture.fetch(tmp_path)


def test_a_block_with_await_that_an_exception_leaves_cancels_its_capture(fleet: Fleet) -> None:
    async def work() -> api.AsyncCapture:
        capture = api.async_capture(EVERYBODY, options(fleet, LONG_S))
        with pytest.raises(ZeroDivisionError):
            async with capture:
                _ = 1 / 0
        return capture

    assert verdicts(asyncio.run(work())) == ["CANCELLED"] * HOSTS * AGENTS


@pytest.mark.slow
def test_the_end_of_a_block_waits_for_the_verdicts(fleet: Fleet, tmp_path: Path) -> None:
    with api.capture(EVERYBODY, options(fleet, SHORT_S)) as capture:
        assert "running on" in repr(capture)
    assert capture.result().done
    assert capture.fetch(tmp_path).merged is not None


@pytest.mark.slow
def test_with_await_the_loop_goes_on_and_no_thread_stays(fleet: Fleet, tmp_path: Path) -> None:
    async def work(folder: Path) -> tuple[api.AsyncCapture, int]:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(turn())
        async with api.async_capture(EVERYBODY, options(fleet, SHORT_S)) as capture:
            begun = turns
        during = turns - begun
        found = await capture.fetch(folder)
        assert found.merged is not None
        assert {row["rank"] for row in await capture.report("overview")} == set(range(HOSTS * AGENTS))
        other.cancel()
        return capture, during

    capture, turns = asyncio.run(work(tmp_path / "1"))
    assert capture.result().done and turns > 10
    before = set(threading.enumerate())  # gRPC keeps one
    asyncio.run(work(tmp_path / "2"))
    assert set(threading.enumerate()) <= before


@pytest.mark.slow
def test_a_task_that_is_cancelled_cancels_its_capture(fleet: Fleet) -> None:
    async def work() -> tuple[api.AsyncCapture, set[str]]:
        capture, inside = api.async_capture(EVERYBODY, options(fleet, LONG_S)), asyncio.Event()

        async def traced() -> None:
            async with capture:
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(traced())
        async with asyncio.timeout(scaled(30)):
            await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        others = asyncio.all_tasks() - {asyncio.current_task()}
        return capture, {repr(each) for each in others if "fleet" in repr(each)}

    capture, left = asyncio.run(work())
    assert verdicts(capture) == ["CANCELLED"] * HOSTS * AGENTS
    assert left == set()


@pytest.mark.slow
def test_a_start_that_is_cancelled_leaves_nothing_armed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        armed = asyncio.Event()

        async def measure(*_: object) -> None:
            armed.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(FleetRun, "_measure", measure)
        task = asyncio.create_task(api.async_capture(EVERYBODY, options(fleet, LONG_S)).__aenter__())
        async with asyncio.timeout(scaled(30)):
            await armed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    listed = run_process(["captures", "list", "--limit", "1", "--hosts", str(fleet.hosts_file())], environment())
    assert listed.stdout.count("CANCELLED") == HOSTS


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_block_without_await_works_beside_any_loop_and_leaves_the_handler_of_interrupts(
    fleet: Fleet, tmp_path: Path, way: str
) -> None:
    if way:
        pytest.importorskip(way)
    places = [(host.name, host.address) for host in fleet.hosts]
    program = tmp_path / "test_way.py"
    program.write_text(PROGRAM.format(places=places, duration_s=SHORT_S) + WAYS[way])
    runner = ["-m", "pytest", "-qs", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", os.devnull]
    command = [sys.executable, *(runner if way == "pytest_asyncio" else ()), str(program)]
    found = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert found.returncode == 0, found
    traced, left = re.findall(r"(?:TRACED|LEFT) (.*)", found.stdout)
    assert re.fullmatch(rf"True( DONE| PARTIAL){{{HOSTS * AGENTS}}}", traced)  # on a busy machine one may begin late
    assert left == "True"


def test_before_it_is_entered_there_is_nothing_to_wait_for() -> None:
    capture = api.async_capture(EVERYBODY, api.CaptureOptions())
    assert repr(capture) == "<AsyncCapture: not entered>"
    with pytest.raises(errors.UsageProblem, match="async with"):
        capture.result()
