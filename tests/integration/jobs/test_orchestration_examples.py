"""The examples of docs/orchestration.md about kinetoctl.api, run against the daemons of two hosts."""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from campaign.parts.fleet import Fleet, running_fleet
from kinetoctl import api

DOCUMENT = Path(__file__).parents[3] / "docs/orchestration.md"
HOSTS, AGENTS = 2, 1


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(HOSTS, agents=AGENTS) as started:
        yield started


def example(marker: str) -> str:
    """The only block of Python that has this text in it; files go to the folder in which it runs."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if marker in block)
    return str(found).replace('"/traces', '"traces')


@pytest.fixture
def run(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs an example; its hosts are those of the fleet, its processes the simulated ranks."""
    monkeypatch.chdir(tmp_path)

    everybody = api.Selection(ranks=(api.ANY_RANK,))
    places = [api.Place(host.name, host.address) for host in fleet.hosts]

    def here(options: api.CaptureOptions) -> api.CaptureOptions:
        assert options.hosts
        duration_s = min(options.duration_s, 0.2)
        return replace(options, hosts=(), at=places, duration_s=duration_s, attach=False)

    def capture(selection: api.Selection, options: api.CaptureOptions) -> api.Capture:
        return api.capture(everybody, here(options))

    def async_capture(selection: api.Selection, options: api.CaptureOptions) -> api.AsyncCapture:
        return api.async_capture(everybody, here(options))

    def stacks(selection: api.Selection, options: api.HostOptions) -> api.StackResult:
        assert options.hosts
        return api.stacks(selection, replace(options, hosts=(), at=places))

    shim = SimpleNamespace(**{**vars(api), "capture": capture, "async_capture": async_capture, "stacks": stacks})

    def executed(marker: str, **names: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"api": shim, **names}
        code = example(marker).replace("from kinetoctl import api\n", "")
        exec(compile(code, str(DOCUMENT), "exec"), found)
        return found

    return executed


def traces(folder: Path) -> int:
    return len(list(folder.rglob("*.json.gz")))


def test_the_first_example(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = run('hosts=["n1", "n2"]')
    assert found["result"].done
    assert found["files"].merged.exists()
    assert traces(tmp_path / "traces") >= HOSTS * AGENTS


@pytest.mark.slow
def test_the_watchdog(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run("def on_slow_step")["on_slow_step"]("4242", ["n1", "n2"])
    assert traces(tmp_path / "traces/slow") >= HOSTS * AGENTS


def test_the_watchdog_that_says_where_a_job_stands(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = run("def on_no_progress")["on_no_progress"]("4242", ["n1", "n2"])
    out = capsys.readouterr().out
    assert verdict and verdict in out
    assert {rank for ranks in re.findall(r"\[([\d, ]+)\]$", out, re.MULTILINE) for rank in ranks.split(", ")} == {
        "0",
        "1",
    }


@pytest.mark.slow
def test_the_benchmark(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = run("def traced_benchmark", benchmark=lambda: asyncio.sleep(0))
    assert isinstance(asyncio.run(found["traced_benchmark"](1, "n1")), list)
    assert traces(tmp_path / "traces/benchmark") >= HOSTS * AGENTS


@pytest.mark.slow
def test_the_actor_of_ray(run: Callable[..., dict[str, Any]]) -> None:
    nodes = [{"NodeManagerAddress": f"10.0.0.{number}", "Alive": number < 2} for number in range(3)]
    ray = SimpleNamespace(remote=lambda kind: kind, nodes=lambda: nodes)
    folder = run("@ray.remote", ray=ray)["Tracer"]().trace(0.2)
    assert traces(Path(folder)) >= HOSTS * AGENTS


@pytest.mark.slow
def test_the_task_of_airflow(run: Callable[..., dict[str, Any]]) -> None:
    names = {"task": lambda **_: lambda function: function, "AirflowException": RuntimeError}
    trace_job = run("@task(retries=2)", **names)["trace_job"]
    merged = Path(trace_job("4242", ["n1", "n2"], "manual__2026-01-31"))
    assert merged.exists()
    assert Path(trace_job("4242", ["n1", "n2"], "manual__2026-01-31")).exists()  # a retry finds the same capture
