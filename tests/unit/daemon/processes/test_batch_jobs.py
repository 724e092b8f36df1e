import os
from pathlib import Path

import pytest
from kinetod.processes.batch_jobs import Job, job_in, jobs_of, owned_by, step_in

STEP = "/system.slice/slurmstepd.scope/job_77/step_0/user/task_0"


@pytest.mark.parametrize(
    ("cgroups", "job"),
    [
        (f"0::{STEP}\n", Job("77", None)),
        ("0::/system.slice/node1_slurmstepd.scope/job_77/step_extern\n", Job("77", None)),
        ("9:name=systemd:/\n4:memory:/slurm/uid_1000/job_77/step_0\n0::/\n", Job("77", 1000)),
        ("4:memory:/slurm_node-1/uid_1000/job_77\n", Job("77", 1000)),
        ("0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_77/step_0\n", None),
        ("0::/user.slice/slurm/uid_1000/job_77\n", None),
        ("0::/../../system.slice/slurmstepd.scope/job_77/step_0\n", None),
        ("0::/system.slice/slurmstepd.scope/job_77x/step_0\n", None),
        (f"0::{STEP}/job_78\n", Job("77", None)),
        ("", None),
    ],
)
def test_a_job_is_a_place_that_only_slurm_can_make(cgroups: str, job: Job | None) -> None:
    assert job_in(cgroups) == job


@pytest.mark.parametrize(
    ("cgroups", "step"),
    [
        (f"0::{STEP}\n", "0"),
        ("0::/system.slice/slurmstepd.scope/job_77/step_batch/user/task_0\n", "batch"),
        ("4:memory:/slurm/uid_1000/job_77/step_3+1/task_2\n0::/\n", "3+1"),
        ("9:cpuset:/slurm/uid_1000/job_77\n4:memory:/slurm/uid_1000/job_77/step_extern\n", "extern"),
        ("0::/system.slice/slurmstepd.scope/job_77\n", ""),
        ("0::/user.slice/system.slice/slurmstepd.scope/job_77/step_0\n", ""),
        ("", ""),
    ],
)
def test_the_step_is_the_folder_below_the_job(cgroups: str, step: str) -> None:
    assert step_in(cgroups) == step


def test_a_job_belongs_to_the_user_of_its_oldest_process_that_is_not_roots() -> None:
    members = [(Job("77", None), 0, 1), (Job("77", None), 1000, 2), (Job("77", None), 2000, 3)]
    assert owned_by(1000, members) == {"77"}
    assert owned_by(2000, members) == frozenset()
    assert owned_by(0, members) == frozenset()


def test_the_uid_in_the_path_counts_more_than_processes() -> None:
    members = [(Job("77", 1000), 2000, 1), (Job("78", 2000), 1000, 1)]
    assert owned_by(1000, members) == {"77"}


def test_the_jobs_of_a_host_are_read_from_its_processes(tmp_path: Path) -> None:
    for pid, uid, start in ((10, 0, 100), (11, 1000, 200), (12, 2000, 300)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(f"0::{STEP}\n")
        (folder / "stat").write_text(f"{pid} (a (b) c) S " + " ".join(["0"] * 18) + f" {start} 0\n")
        (folder / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (tmp_path / "13").mkdir()
    (tmp_path / "self").mkdir()
    assert jobs_of(1000, tmp_path) == {"77"}
    assert jobs_of(2000, tmp_path) == frozenset()
    assert jobs_of(os.getuid() + 12345) == frozenset()
