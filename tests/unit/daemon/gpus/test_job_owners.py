"""Which batch jobs have which GPU, by the folder that a prolog keeps."""

import os
from pathlib import Path

from kinetod.gpus.gpu_types import GpuState
from kinetod.gpus.job_owners import MAX_JOBS, JobFolder, jobs_of


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
