"""Slurm's scripts, run as slurmd and slurmstepd run them."""

import contextlib
import fcntl
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.waiting import scaled

SCRIPTS = Path(__file__).parents[3] / "deploy/slurm"


def run(name: str, *arguments: str, **environ: str) -> str:
    """The output; slurmd gives its scripts next to no environment."""
    done = subprocess.run(
        [str(SCRIPTS / name), *arguments], env=environ, capture_output=True, text=True, check=True, timeout=scaled(20)
    )
    assert done.stderr == ""
    return done.stdout


def listed(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("[!.]*")}


def refused(name: str, folder: Path) -> str:
    """What is said where nothing is done."""
    environ = {"SLURM_JOB_ID": "41", "SLURM_JOB_GPUS": "0"}
    command = [str(SCRIPTS / name), str(folder)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=scaled(20)).stderr


def test_each_gpu_has_the_job_from_its_prolog_to_its_epilog(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    run("Prolog", str(folder), SLURM_JOB_ID="41", SLURM_JOB_GPUS="0,1")
    run("Prolog", str(folder), SLURM_JOB_ID="4", SLURM_JOB_GPUS="1")
    run("Prolog", str(folder), SLURM_JOB_ID="4", SLURM_JOB_GPUS="1")
    assert listed(folder) == {"0": "41\n", "1": "41\n4\n"}
    assert folder.stat().st_mode & 0o777 == 0o755
    run("Epilog", str(folder), SLURM_JOB_ID="41")
    assert listed(folder) == {"1": "4\n"}
    run("Epilog", str(folder), SLURM_JOB_ID="4")
    assert listed(folder) == {}


def test_jobs_that_begin_and_end_together_lose_none(tmp_path: Path) -> None:
    ids = [str(number) for number in range(1, 21)]
    with ThreadPoolExecutor(2) as pool:  # each waits for another one for 5 s at most
        list(pool.map(lambda id: run("Prolog", str(tmp_path), SLURM_JOB_ID=id, SLURM_JOB_GPUS="0"), ids))
        assert sorted((tmp_path / "0").read_text().split(), key=int) == ids
        list(pool.map(lambda id: run("Epilog", str(tmp_path), SLURM_JOB_ID=id), ids[:-1]))
    assert listed(tmp_path) == {"0": "20\n"}


@pytest.mark.parametrize("gpus", ["../x", "/etc/x", ".x", "", "b;c", "*", "-n", "$(id)", "\\0101"])
def test_what_is_no_gpu_makes_no_file(tmp_path: Path, gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jobs"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)  # what * would be
    run("Prolog", str(folder), SLURM_JOB_ID="41", SLURM_JOB_GPUS=gpus)
    assert [path for path in tmp_path.rglob("[!.]*") if path.is_file()] == []


@pytest.mark.parametrize("job", [".*", "-f/etc/passwd", "4 1", "4\n41", "$(id)", "41;id"])
def test_what_is_no_job_neither_comes_in_nor_takes_others_out(tmp_path: Path, job: str) -> None:
    run("Prolog", str(tmp_path), SLURM_JOB_ID="41", SLURM_JOB_GPUS="0")
    run("Prolog", str(tmp_path), SLURM_JOB_ID=job, SLURM_JOB_GPUS="0,1")
    run("Epilog", str(tmp_path), SLURM_JOB_ID=job)
    assert listed(tmp_path) == {"0": "41\n"}


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_nothing_is_written_where_others_can_put_links(tmp_path: Path, mode: int) -> None:
    folder, another = tmp_path / "jobs", tmp_path / "roots"
    folder.mkdir()
    folder.chmod(mode)
    another.write_text("40\n41\n")
    for name in ("0", ".rest", ".lock"):
        (folder / name).symlink_to(another)
    for script in ("Prolog", "Epilog"):
        assert "others can write to" in refused(script, folder)
    assert another.read_text() == "40\n41\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_nor_in_a_folder_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    assert "others can write to" in refused("Prolog", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_no_user_of_the_node_can_hold_jobs_up(tmp_path: Path) -> None:
    run("Prolog", str(tmp_path), SLURM_JOB_ID="41", SLURM_JOB_GPUS="0")
    tmp_path.chmod(0o755)
    lockable = [path for path in (tmp_path, *tmp_path.iterdir()) if path.stat().st_mode & 0o077]
    with contextlib.ExitStack() as stack:
        for path in lockable:  # what others can open they can lock
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        run("Epilog", str(tmp_path), SLURM_JOB_ID="41")  # leaves the job where it is if it waits in vain
    assert listed(tmp_path) == {}


def test_programs_come_from_the_systems_folders_only(tmp_path: Path) -> None:
    for name in ("flock", "mkdir", "grep", "find", "id", "tr", "mv", "rm"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/run-as-root\n")
        (tmp_path / name).chmod(0o755)
    path, jobs = f"{tmp_path}:/usr/bin:/bin", str(tmp_path / "jobs")
    run("Prolog", jobs, SLURM_JOB_ID="41", SLURM_JOB_GPUS="0", PATH=path)
    run("Epilog", jobs, SLURM_JOB_ID="41", PATH=path)
    assert not (tmp_path / "run-as-root").exists()


def test_jobs_without_gpus_and_nodes_without_a_map_are_left_alone(tmp_path: Path) -> None:
    run("Prolog", str(tmp_path / "jobs"), SLURM_JOB_ID="41")
    run("Epilog", str(tmp_path / "jobs"), SLURM_JOB_ID="41")
    assert listed(tmp_path) == {}


@pytest.fixture
def agent_socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        path = os.path.join(folder, "agent.sock")  # noqa: PTH118  # an address, to be given as text
        listening.bind(path)
        yield path


def test_tasks_get_the_agent_where_a_daemon_is(agent_socket: str) -> None:
    assert run("TaskProlog", KINETO_AGENT_SOCKET=agent_socket) == "export KINETO_AGENT=1\n"


@pytest.mark.parametrize("said", ["0", "1", ""])
def test_a_job_that_has_said_it_itself_is_left_alone(agent_socket: str, said: str) -> None:
    assert run("TaskProlog", KINETO_AGENT_SOCKET=agent_socket, KINETO_AGENT=said) == ""


def test_tasks_get_nothing_where_no_daemon_is(tmp_path: Path) -> None:
    assert run("TaskProlog", KINETO_AGENT_SOCKET=str(tmp_path / "none")) == ""
    (tmp_path / "file").touch()
    assert run("TaskProlog", KINETO_AGENT_SOCKET=str(tmp_path / "file")) == ""


def test_the_packages_bring_them() -> None:
    build = (SCRIPTS.parent / "packages/build.sh").read_text()
    scripts = sorted(path.name for path in SCRIPTS.iterdir() if os.access(path, os.X_OK))
    assert scripts == ["Epilog", "Prolog", "TaskProlog"]
    assert "deploy/slurm/{TaskProlog,Prolog,Epilog}" in build
    assert "\n/usr/share/kinetod\n" in (SCRIPTS.parent / "packages/kinetod.spec.in").read_text()
