"""`python -m kinetod.probe`, as containers are probed."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kinetod.probe import main
from support.service import attach_service
from support.service.daemon import running_daemon
from support.waiting import scaled, until


def test_a_daemon_that_serves_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kinetod.probe.ask_daemon.__defaults__", (scaled(60),))
    with running_daemon() as daemon:
        assert main([f"unix:{daemon.rpc_socket}"]) == 0
    assert capsys.readouterr().err == ""


def test_where_nobody_listens_nothing_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"unix:{tmp_path}/kinetod.sock"]) == 1
    assert main([f"seqpacket:{tmp_path}/attach.sock"]) == 1
    assert main([f"counters:{tmp_path}/counters.sock"]) == 1
    said = capsys.readouterr().err
    assert f"unix:{tmp_path}/kinetod.sock: " in said and f"{tmp_path}/attach.sock: " in said
    assert f"cannot be reached at {tmp_path}/counters.sock" in said


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_helper_that_answers_is_well_and_logs_nothing_of_it() -> None:
    with attach_service.running() as service:
        service.logged("serves")
        assert main([f"seqpacket:{service.socket}"]) == 0
        assert "look by" not in service.log()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_helper_that_hangs_is_not_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinetod.attach_helper.helper_client.LOOK_DEADLINE_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hanging:
        hanging.bind(str(tmp_path / "attach.sock"))
        hanging.listen()
        assert main([f"seqpacket:{tmp_path}/attach.sock"]) == 1


def test_a_sampler_of_counters_that_answers_is_well_and_one_that_hangs_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "counters.sock"
    command = [sys.executable, "-m", "kinetod.counters", "--socket", str(path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as sampler:
        try:
            until(lambda: path.exists() and main([f"counters:{path}"]) == 0, "it is well")
            sampler.send_signal(signal.SIGSTOP)
            monkeypatch.setattr("kinetod.probe.ask_counters.__defaults__", (0.1,))
            capsys.readouterr()
            assert main([f"counters:{path}"]) == 1
            assert "kinetod-counters did not answer within 0.1 s" in capsys.readouterr().err
        finally:
            sampler.kill()
