"""Jobs of a real Slurm are traced by their ids: two nodes, each with a slurmd and a kinetod of its own.

tests/campaign/slurm.py does the rest: steps, heterogeneous jobs, control groups, the scripts of deploy/slurm.
"""

from collections.abc import Iterator

import pytest
from support.peers.slurm import BOB, TASK, Cluster, running_cluster, why_not
from support.service.cli import Result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with running_cluster() as started:
        yield started


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.end_jobs()


def verdicts(result: Result) -> list[tuple[str, int, str]]:
    """Host, rank and verdict of each process."""
    assert result.code == 0, result.stderr
    return [
        (host["host"], target["process"]["rank"], target["verdict"])
        for host in result.json()["hosts"]
        for target in host["capture"]["targets"]
    ]


def test_all_ranks_of_a_job_on_two_nodes_are_traced_by_its_owner_and_by_nobody_else(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2", "--ntasks-per-node=2", "--wrap", f"srun {TASK}")
    cluster.ready([job], 4)
    out = cluster.work / "out"
    first, second = cluster.nodes
    expected = [(first, 0), (first, 1), (second, 2), (second, 3)]
    assert verdicts(cluster.trace(str(job), "--output-dir", str(out))) == [(*each, "VERDICT_DONE") for each in expected]
    assert len(list(out.glob("kineto-*/*.json.gz"))) == 4
    assert len(list(out.glob("*.json.gz"))) == 1  # of all

    refused = cluster.trace(str(job), "--no-fetch", uid=BOB)
    assert refused.code == 3
    assert {host["reason_code"] for host in refused.json()["hosts"]} == {"NO_MATCH"}
    assert f"Slurm job {job} belongs to ada; only its owner" in refused.stderr


def test_an_array_is_traced_as_a_whole_and_by_its_tasks(cluster: Cluster) -> None:
    job = cluster.submit("--array=0-2%2", "--ntasks=1", "--wrap", f"srun {TASK}")
    ids = cluster.ids(f"{job}_0", f"{job}_1")
    cluster.ready(ids, 2)
    both = cluster.trace(str(job), "--no-fetch", "--no-merge")
    assert [verdict for _, _, verdict in verdicts(both)] == ["VERDICT_DONE"] * 2
    assert f"2 of 3 parts of Slurm job {job} are running; the others are PENDING" in both.stderr
    (host,) = cluster.trace(f"{job}_1", "--no-fetch").json()["hosts"]
    (target,) = host["capture"]["targets"]
    assert (target["process"]["job_id"], target["verdict"]) == (str(ids[1]), "VERDICT_DONE")
