import os
import sys
import types
from pathlib import Path
from typing import Dict, Optional

import pytest
from kineto_agent.control import self_description
from kineto_agent.protocol import wire


def test_hello_says_who_this_process_is() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "8", "SLURM_JOB_ID": "77"}
    hello = self_description.hello({"python_stacks": ["python_function"]}, 12, "c1", environ)
    assert (hello.pid, hello.rank, hello.world_size, hello.job_id) == (os.getpid(), 3, 8, "77")
    assert (hello.iterations, hello.busy_capture_id) == (12, "c1")
    assert hello.python_version == "%d.%d.%d" % sys.version_info[:3]
    command = Path("/proc/self/cmdline").read_text()
    assert list(hello.argv) == command.split("\0")[:-1]


@pytest.mark.parametrize(
    ("environ", "rank", "size"),
    [
        ({}, None, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "9", "SLURM_NTASKS": "10"}, 1, 2),
        ({"SLURM_PROCID": "9", "SLURM_NTASKS": "10"}, 9, 10),
        ({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "5"}, 4, 5),
        ({"RANK": "one", "PMI_RANK": "6"}, 6, None),
        ({"RANK": "99999999999999999999"}, None, None),
        ({"RANK": "-1"}, None, None),
    ],
)
def test_the_rank_is_what_the_launcher_said(environ: Dict[str, str], rank: Optional[int], size: Optional[int]) -> None:
    hello = self_description.hello({}, -1, "", environ)
    assert (hello.rank, hello.world_size) == (rank, size)


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "run"}, "77"),
        ({"TORCHELASTIC_RUN_ID": "run"}, "run"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"SLURM_JOB_ID": "x" * 1000}, "x" * 256),
        ({"SLURM_JOB_ID": "a\udcffb"}, "a\ufffdb"),
    ],
)
def test_the_job_is_slurms_or_torchruns(environ: Dict[str, str], job: str) -> None:
    assert self_description.job_id(environ) == job


def test_the_framework_is_named_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert self_description.framework() == ""
    torch = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert self_description.framework() == ""  # its import has only begun
    torch.__dict__["__version__"] = "2.11.0+cu130"
    assert self_description.framework() == "torch 2.11.0+cu130"


def test_a_huge_command_line_still_fits_into_a_frame(tmp_path: Path) -> None:
    (tmp_path / "cmdline").write_bytes(b"\0".join([b"python", b"\x01" * 500000, b"\xff" * 3000]) + b"\0")
    arguments = self_description.command_line(str(tmp_path / "cmdline"))
    assert arguments == ["python", "\x01" * 2048, "..."]
    (tmp_path / "cmdline").write_bytes(b"\x01\0" * 100000)
    hello = self_description.hello({}, -1, "", {})._replace(
        argv=self_description.command_line(str(tmp_path / "cmdline"))
    )
    assert len(wire.encode(hello)) < wire.MAX_FRAME_BYTES


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "cmdline").write_bytes(b"python\0a\xffb\0\0")
    assert self_description.command_line(str(tmp_path / "cmdline")) == ["python", "a\ufffdb", ""]


def test_without_proc_there_is_no_command_line() -> None:
    assert self_description.command_line("/nowhere") == []
