"""Hardware counters through a real daemon, which starts its own kinetod-counters with the fake libcupti."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.counters.fake_pm_sampling import FakePmSampling
from support.counters.gpu_metrics_tables import PlayedAmdgpu
from support.service.cli import run_process, watched_counters
from support.service.daemon import Daemon, running_daemon
from support.waiting import until


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
    gpus = watched_counters(daemon.client_environ(), "--interval", "200ms")
    assert [gpu["uuid"][-1] for gpu in gpus] == ["0", "1"]
    for number, gpu in enumerate(gpus):
        assert gpu["dropped_samples"] == 0
        assert 1000 * number <= gpu["means"][0] < 1000 * number + 100
        assert gpu["means"][1] - gpu["means"][0] == pytest.approx(100)
    assert fake.wrong() == []


def test_a_client_that_goes_away_frees_the_counters(daemon: Daemon, fake: FakePmSampling) -> None:
    request = pb.WatchCountersRequest(gpus=[0], period_ns=100_000_000)

    def watches() -> bool:
        stream = daemon.stub().WatchCounters(request, timeout=60)
        try:
            return bool(next(stream).gpus[0].uuid)
        except grpc.RpcError as exc:  # the daemon has not noticed yet that the one before has gone
            assert "for another request" in str(exc)
            return False
        finally:
            stream.cancel()

    for _ in range(3):
        until(watches, "the counters are free", pause_s=0.1)
    again = run_process(["counters", "watch", "--once", "--gpu", "1", "--interval", "200ms"], daemon.client_environ())
    assert again.code == 0
    assert fake.wrong() == []


def test_a_busy_gpu_is_told_with_its_code(daemon: Daemon, fake: FakePmSampling) -> None:
    fake.play("fail=cuptiPmSamplingSetConfig:26")
    result = run_process(["counters", "watch", "--once"], daemon.client_environ())
    assert result.code == 5
    assert "is using its counters" in result.stderr and "[COUNTERS_BUSY]" in result.stderr


def test_gpus_of_two_vendors_are_listed_and_watched_together(fake: FakePmSampling, tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path / "host", (1, 8), (1, 3))
    played.host.write(played.folders[1], {"power__runtime_status": "suspended"})
    variables = {"KINETOD_COUNTERS_LIBRARY": str(fake.library), "KINETOD_COUNTERS_SOCKET": "", **played.environ()}
    with played.alive(), running_daemon(environ={**fake.environ, **variables}) as daemon:
        listed = run_process(["counters", "list"], daemon.client_environ())
        assert listed.code == 0 and "Sampled by cupti (130001), amdgpu (" in listed.stderr
        rows = [line.split() for line in listed.stdout.splitlines()]
        assert [(row[0], "gfx942" in row) for row in rows[1:]] == [
            ("0", False), ("1", False), ("2", True), ("3", True),
        ]  # fmt: skip
        assert "COUNTERS_UNAVAILABLE" in rows[4]
        sets = run_process(["counters", "sets"], daemon.client_environ())
        assert "average_gfx_activity" in sets.stdout and "does not cover matrix units" in sets.stdout
        gpus = {gpu["uuid"]: gpu for gpu in watched_counters(daemon.client_environ())}
        assert gpus[played.uuids[0]]["means"][0] == pytest.approx(10)
        assert played.uuids[1] not in gpus
        by_name = ["counters", "watch", "--once", "gr__cycles_active.avg.pct_of_peak_sustained_elapsed"]
        mixed = run_process(by_name, daemon.client_environ())
        assert mixed.code == 0 and [line.split()[0] for line in mixed.stdout.splitlines()] == ["GPU", "0", "1"]
        assert "GPU 2 is not watched: " in mixed.stderr
        fast = ["counters", "watch", "--once", "--gpu", "2", "--counter-interval", "100us"]
        refused = run_process(fast, daemon.client_environ())
        assert refused.code != 0 and "use at least 10 ms" in refused.stderr
    assert fake.wrong() == []
