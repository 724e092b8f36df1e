"""Slurm's account and partition by the environments of the processes, in a folder that stands for /proc."""

import os
from pathlib import Path

import pytest
from kinetod.gpus.gpu_owners import MAX_JOBS, JobFolder, SlurmNames, SlurmVariables, agreed, jobs_of
from kinetod.gpus.gpu_types import GpuProcess, GpuState, Snapshot
from support.waiting import scaled

PHYSICS = SlurmNames(account="physics", partition="gpu")


def process(proc: Path, pid: int, environ: bytes, *, ticks: int = 1000) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{pid} (python (x) y) S {' '.join(['0'] * 18)} {ticks} 0 0\n")
    (folder / "environ").write_bytes(environ)


def snapshot(*pids: int) -> Snapshot:
    processes = tuple(GpuProcess(pid=pid) for pid in pids)
    return Snapshot(gpus=(GpuState(vendor="nvidia", index=0, uuid="a", name="H200", processes=processes),))


def reader(proc: Path, deadline_s: float | None = None) -> SlurmVariables:
    return SlurmVariables(proc=proc, deadline_s=scaled(20) if deadline_s is None else deadline_s)


def test_a_process_says_its_account_and_partition(tmp_path: Path) -> None:
    process(tmp_path, 7, b"A=B\0SLURM_JOB_ACCOUNT=physics\0SLURM_JOB_PARTITION=gpu\0SLURM_JOB_ACCOUNT=later\0")
    process(tmp_path, 8, b"SLURM_JOB_ACCOUNT_X=no\0HOME=/\0")
    assert reader(tmp_path)(snapshot(7, 8, 9)) == {7: PHYSICS, 8: SlurmNames()}


def test_what_a_process_says_is_bounded_and_printable(tmp_path: Path) -> None:
    process(tmp_path, 7, b"SLURM_JOB_ACCOUNT=" + b"\x1b[2J\xff" + b"a" * 10**6 + b"\0")
    (names,) = reader(tmp_path)(snapshot(7)).values()
    assert len(names.account) == 128
    assert names.account.isprintable()


def test_a_process_that_lets_its_reader_wait_costs_its_names_only(tmp_path: Path) -> None:
    process(tmp_path, 7, b"")
    (tmp_path / "7/environ").unlink()
    os.mkfifo(tmp_path / "7/environ")  # opening it waits for somebody who writes
    assert reader(tmp_path, 0.01)(snapshot(7)) == {}
    (tmp_path / "7/environ").open("wb").close()


def test_a_late_answer_is_not_taken_for_another_process_of_that_number(tmp_path: Path) -> None:
    process(tmp_path, 7, b"")
    (tmp_path / "7/environ").unlink()
    os.mkfifo(tmp_path / "7/environ")
    slow = reader(tmp_path, 0.01)
    assert slow(snapshot(7)) == {}
    with (tmp_path / "7/environ").open("wb") as late:
        (tmp_path / "7/environ").unlink()
        process(tmp_path, 7, b"SLURM_JOB_ACCOUNT=other\0", ticks=2000)
        late.write(b"SLURM_JOB_ACCOUNT=physics\0")
    slow._deadline_s = scaled(20)
    late_or_new = slow(snapshot(7))  # the late answer, if it has not come before the question
    assert late_or_new.get(7, SlurmNames()).account in ("", "other")
    assert slow(snapshot(7)) == {7: SlurmNames(account="other")}


@pytest.mark.parametrize(
    ("said", "common"),
    [
        ({}, SlurmNames()),
        ({1: PHYSICS, 2: PHYSICS}, PHYSICS),
        ({1: PHYSICS}, SlurmNames()),
        ({1: PHYSICS, 2: SlurmNames(account="physics", partition="cpu")}, SlurmNames(account="physics")),
    ],
    ids=["nobody says anything", "the same", "one cannot be read", "two partitions"],
)
def test_only_what_all_processes_say_counts(said: dict[int, SlurmNames], common: SlurmNames) -> None:
    assert agreed((GpuProcess(pid=1), GpuProcess(pid=2)), said) == common


def test_a_gpu_that_nobody_uses_has_no_account() -> None:
    assert agreed((), {1: PHYSICS}) == SlurmNames()


def test_each_gpu_has_a_file_with_a_job_a_line(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("41\n")
    (tmp_path / "1.2").write_text("42\n43\n42\n")
    (tmp_path / "2").write_text("\n")
    assert JobFolder(tmp_path)() == {"0": ("41",), "1.2": ("42", "43")}


def test_a_folder_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert JobFolder(tmp_path / "none")() == {}


def test_only_files_are_read_and_only_so_much_of_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").symlink_to("/etc/hostname")
    (tmp_path / "2").mkdir()
    (tmp_path / "3").write_text("\n".join(map(str, range(10 * MAX_JOBS))))
    (tmp_path / "4").write_bytes(b"4\x1b[2J2\xff\n")
    found = JobFolder(tmp_path)()
    assert found == {"3": tuple(map(str, range(MAX_JOBS))), "4": ("4 [2J2�",)}


def test_a_part_of_a_gpu_counts_for_the_gpu() -> None:
    gpu = GpuState(vendor="nvidia", index=1, uuid="GPU-1", name="H200")
    assert jobs_of(gpu, {"1.0": ("7",), "GPU-1": ("8",), "11": ("9",), "0": ("1",)}) == ["7", "8"]
