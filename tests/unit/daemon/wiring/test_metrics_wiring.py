"""Where metrics are served: only where the configuration says, and to other hosts only if it says so."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from kinetod.agents.agent_hub import AgentHub
from kinetod.attach.attach_types import Status
from kinetod.base.errors import StartError
from kinetod.config.addresses import ListenAddress, parse_metrics_listen
from kinetod.config.config_sources import metrics_problem
from kinetod.config.settings import Config
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.telemetry import metrics_server
from kinetod.wiring.metrics_wiring import json_log_findings, open_json_log, start_metrics
from support.waiting import until

CONFIG = Config(listen=(), agent_socket=Path("/run/a"), state_dir=Path("/"))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9417", "127.0.0.1", 9417),
        ("[::1]:0", "::1", 0),
        ("localhost:1", "localhost", 1),
        ("0.0.0.0:9", "0.0.0.0", 9),
    ],
)
def test_an_address_is_an_ip_and_a_port(text: str, host: str, port: int) -> None:
    assert parse_metrics_listen(text) == ListenAddress(host=host, port=port)


@pytest.mark.parametrize(
    "text", ["", "9417", ":9417", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "node1:9", "unix:/x", "[::1]:²"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_metrics_listen(text)


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [("127.0.0.1:1", False, False), ("[::1]:1", False, False), ("localhost:1", False, False),
     ("0.0.0.0:1", False, True), ("[::]:1", False, True), ("10.0.0.1:1", False, True), ("0.0.0.0:1", True, False)],
)  # fmt: skip
def test_beyond_loopback_needs_a_word(text: str, allowed: bool, refused: bool) -> None:
    config = replace(CONFIG, metrics_listen=parse_metrics_listen(text), metrics_allow_remote=allowed)
    problem = metrics_problem(config)
    assert bool(problem) == refused
    assert not refused or "metrics.allow_remote = true" in problem


def test_lines_of_metrics_that_are_lost_are_a_problem_of_the_host(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    json_log = open_json_log(replace(CONFIG, json_log=str(folder / "log")))
    assert json_log is not None
    assert json_log_findings(None) == json_log_findings(json_log) == []
    folder.rename(tmp_path / "gone")
    json_log.write(0, {})
    (found,) = json_log_findings(json_log)
    assert (found.status, found.detail) == (
        Status.PROBLEM,
        f"metric lines are being lost: {folder}/log cannot be written: No such file or directory",
    )


def started(config: Config) -> int:
    """How many things have to be stopped after a start."""

    async def start() -> int:
        async with contextlib.AsyncExitStack() as stack:
            start_metrics(
                config,
                json_log=open_json_log(config),
                hub=AgentHub(),
                captures_running=lambda: 0,
                gpus=gpus,
                hostname="h",
                healthy=lambda: True,
                stack=stack,
            )
            return len(stack._exit_callbacks)  # type: ignore[attr-defined]  # untold

    gpus = GpuReader()
    with contextlib.closing(gpus):
        return asyncio.run(start())


def test_what_is_measured_at_intervals_is_started_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metrics_server, "POLL_S", 0.01)
    path = tmp_path / "metrics.log"
    listen = ListenAddress(host="127.0.0.1", port=0)
    assert started(replace(CONFIG, metrics_listen=listen, metrics_compat="dynolog")) == 2
    assert started(replace(CONFIG, json_log=str(path))) == 1
    assert started(replace(CONFIG, json_log=str(path), gpu_interval_ns=10**9)) == 2
    until(lambda: '"uptime":' in path.read_text(), "the first line of the host is written")


def test_a_log_of_metrics_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"metrics\.json_log: .* cannot be written"):
        started(replace(CONFIG, json_log=str(tmp_path / "none/metrics.log")))


def test_nothing_is_served_unless_the_configuration_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "POLL_S", 0.01)
    assert started(CONFIG) == 0
    assert started(replace(CONFIG, metrics_listen=ListenAddress(host="127.0.0.1", port=0))) == 1
