"""Slurm's account and partition by the environments of the processes, in a folder that stands for /proc."""

import os
from pathlib import Path

import pytest
from kinetod.gpus.gpu_types import GpuProcess, GpuState, Snapshot
from kinetod.gpus.slurm_variables import SlurmNames, SlurmVariables, agreed
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
