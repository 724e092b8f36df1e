"""Hardware counters through a real daemon, which starts its own kinetod-counters with the fake libcupti."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.counters.fake_pm_sampling import FakePmSampling
from support.service.cli import run_process
from support.service.daemon import Daemon, running_daemon
from support.waiting import scaled


@pytest.fixture
def fake(tmp_path: Path) -> FakePmSampling:
    (tmp_path / "driver").mkdir()
    return FakePmSampling(tmp_path / "driver")


@pytest.fixture
def daemon(fake: FakePmSampling) -> Iterator[Daemon]:
    variables = {"KINETOD_COUNTERS_LIBRARY": str(fake.library), "KINETOD_COUNTERS_SOCKET": ""}
    with running_daemon(environ={**fake.environ, **variables}) as started:
        yield started


def test_counters_are_listed_and_watched_and_nothing_runs_before(daemon: Daemon, fake: FakePmSampling) -> None:
    assert "cuptiProfilerInitialize" not in fake.calls()
    listed = run_process(["counters", "list"], daemon.client_environ())
    assert listed.code == 0 and "GH100" in listed.stdout
    watched = run_process(["counters", "watch", "--once", "--interval", "200ms", "-o", "json"], daemon.client_environ())
    gpus = watched.json()["gpus"]
    assert [gpu["uuid"][-1] for gpu in gpus] == ["0", "1"]
    for number, gpu in enumerate(gpus):
        assert gpu["samples"] > 0 and gpu["dropped_samples"] == 0
        assert 1000 * number <= gpu["means"][0] < 1000 * number + 100
        assert gpu["means"][1] - gpu["means"][0] == pytest.approx(100)
    assert fake.wrong() == []


def test_a_client_that_goes_away_frees_the_counters(daemon: Daemon, fake: FakePmSampling) -> None:
    request = pb.WatchCountersRequest(gpus=[0], period_ns=100_000_000)
    for _ in range(3):
        stream = daemon.stub().WatchCounters(request, timeout=scaled(60))
        assert next(stream).gpus[0].uuid
        stream.cancel()
    again = run_process(["counters", "watch", "--once", "--gpu", "1", "--interval", "200ms"], daemon.client_environ())
    assert again.code == 0
    assert fake.wrong() == []


def test_a_busy_gpu_is_told_with_its_code(daemon: Daemon, fake: FakePmSampling) -> None:
    fake.play("fail=cuptiPmSamplingSetConfig:26")
    result = run_process(["counters", "watch", "--once"], daemon.client_environ())
    assert (result.code, "has its counters" in result.stderr, "[COUNTERS_BUSY]" in result.stderr) == (5, True, True)
