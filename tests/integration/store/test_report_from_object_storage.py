"""Reports of uploaded captures through a real Dask cluster of two worker processes and an S3-compatible server."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support.peers.s3 import BUCKET, S3, credentials, running_s3
from support.service.cli import run_process
from support.trace_files.job_views import FATAL
from support.trace_files.uploaded import upload

pytestmark = pytest.mark.slow

distributed = pytest.importorskip("distributed")
RANKS = 4
MISSING = 3


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with running_s3() as running:
        yield running


@pytest.fixture(scope="module")
def environ(s3: S3) -> dict[str, str]:
    return {**credentials(), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}"}


@pytest.fixture(scope="module")
def uploaded(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A capture of hosts with two ranks each; one object of one rank is gone."""
    folder = tmp_path_factory.mktemp("captures")
    url = f"s3://{BUCKET}/cluster"
    for host in range(RANKS // 2):
        ranks = {2 * host: 10, 2 * host + 1: 20}
        upload(f"{url}/h{host}/c{host}", folder, ranks, fleet="f1", fs=s3.fs)
    s3.fs.rm(f"{BUCKET}/cluster/h1/c1/103-7000000003/columns/kernel.parquet")
    return url


@pytest.fixture(scope="module")
def cluster(environ: dict[str, str]) -> Iterator[Any]:
    """Two workers, each a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        local = distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
        with local:
            yield local


@pytest.mark.filterwarnings("ignore")
def test_ranks_are_read_by_the_workers_and_a_missing_object_is_named(
    cluster: Any, uploaded: str, environ: dict[str, str]
) -> None:
    wanted = ["--view", "kernels", "--columns", "rank,total_us", "-o", "json"]
    scheduler = ["--scheduler", cluster.scheduler_address]
    found = run_process(["report", uploaded, *scheduler, *wanted], {**os.environ, **environ})
    assert found.code == 4, found.stderr
    document = json.loads(found.stdout)["kernels"]
    times = {row["rank"]: row["total_us"] for row in document["rows"]}
    assert times == {rank: 40.0 if rank % 2 else 20.0 for rank in range(RANKS) if rank != MISSING}
    assert document["notes"] == [
        f"rank {MISSING} is missing: {uploaded}/h1/c1/103-7000000003: columns/kernel.parquet is no longer there"
    ]


@pytest.mark.filterwarnings("ignore")
def test_the_work_of_a_worker_that_dies_is_done_by_another(
    cluster: Any, uploaded: str, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    from kineto_trace.catalog import view_runner
    from kineto_trace.open.trace_discovery import find_traces

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with (
        distributed.Client(cluster, set_as_default=False) as client,
        view_runner.cluster(cluster.scheduler_address) as executor,
    ):
        (victim, *_) = client.run(os.getpid).values()
        os.kill(victim, signal.SIGKILL)
        result = view_runner.run_view("kernels", find_traces(uploaded), executor=executor)
    assert result.values("rank") == [rank for rank in range(RANKS) if rank != MISSING]


@pytest.mark.filterwarnings("ignore")
def test_a_trace_that_every_worker_dies_of_is_missing_and_said(
    cluster: Any, uploaded: str, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    from kineto_trace.catalog import view_runner
    from kineto_trace.open.trace_discovery import find_traces
    from support.trace_files import job_views

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 0)  # else it takes four workers along
    job_views.register()
    try:
        with distributed.Client(cluster, set_as_default=False) as client:
            client.register_plugin(job_views.dask_plugin())
            with view_runner.cluster(cluster.scheduler_address) as executor:
                result = view_runner.run_view(FATAL, find_traces(f"{uploaded}/h0"), executor=executor)
    finally:
        job_views.unregister()
    assert result.values("rank") == [0]
    assert result.notes[0].startswith("rank 1 is missing: ")
    assert "died" in result.notes[0]
