"""Counters of Intel's GPUs, from a driver behind Debian's real loader to the command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.counters.fake_intel_metrics import UUIDS, IntelSampler, running_sampler
from support.service.cli import run_process, watched_counters
from support.service.daemon import Daemon, running_daemon


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[IntelSampler]:
    """kinetod-counters as a service, with the backend that serves all vendors."""
    with running_sampler(tmp_path, backend="auto") as started:
        yield started


@pytest.fixture
def daemon(sampler: IntelSampler) -> Iterator[Daemon]:
    with running_daemon(environ={"KINETOD_COUNTERS_SOCKET": str(sampler.path)}) as started:
        yield started


def test_counters_are_listed_planned_and_watched(daemon: Daemon, sampler: IntelSampler) -> None:
    environ = daemon.client_environ()
    listed = run_process(["counters", "list"], environ)
    assert listed.code == 0 and listed.stdout.count("Fake XPU") == 2 and "level-zero (1.9)" in listed.stderr
    named = run_process(["counters", "list", "--metrics"], environ)
    assert "ComputeBasic.XVE_ACTIVE" in named.stdout
    sets = run_process(["counters", "sets"], environ)
    assert sets.code == 0 and "XVE_ACTIVE+XVE_STALL" in sets.stdout
    assert "no metric of the set interconnect" in sets.stdout + sets.stderr
    gpus = watched_counters(environ, "--interval", "300ms", least=20)
    assert [gpu["uuid"] for gpu in gpus] == [UUIDS[0], UUIDS[1]]
    for gpu in gpus:
        means = dict(zip((metric["label"] for metric in gpu["metrics"]), gpu["means"], strict=True))
        assert gpu["dropped_samples"] == 0
        assert means["SM busy"] == pytest.approx(60) and means["Occupancy"] == pytest.approx(50)
        assert means["DRAM bytes read"] == pytest.approx(2e11, rel=1e-3)
    assert sampler.fake.wrong() == []


def test_a_busy_gpu_is_told_with_its_code(daemon: Daemon, sampler: IntelSampler) -> None:
    sampler.fake.play(f"fail.zetMetricStreamerOpen {0x70010001}")
    result = run_process(["counters", "watch", "--once"], daemon.client_environ())
    assert result.code == 5
    assert "is using its counters" in result.stderr and "[COUNTERS_BUSY]" in result.stderr
