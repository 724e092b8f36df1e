"""Names that a process chose for itself, its files and its control groups are no lines of the kernel's."""

import os
from pathlib import Path

import pytest
from kinetod.agents import proxy_agent
from kinetod.attach.inspect import target_image
from kinetod.processes import process_info
from kinetod.processes.budgets import _head
from kinetod.processes.containers import pod_in, read_cgroups
from kinetod.processes.identity import ProcessKey, identity_of, lines, start_time_ns

ENDS = ("\r", "\v", "\f", "\x1c", "\x1e", "\x85", "\u2028", "\u2029")  # of lines, for str.splitlines
POD = "8f2c1d3e-1111-2222-3333-123456789012"
PID = os.getpid()
OWN_GROUP = "0::/user.slice/user-1000.slice/user@1000.service/mine"


@pytest.fixture(params=ENDS, ids=ascii)
def end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def process(proc: Path, *, name: str = "python3", cgroup: str = OWN_GROUP) -> Path:
    """Our own process with other names, as the kernel writes them."""
    folder = proc / str(PID)
    folder.mkdir()
    (folder / "stat").write_bytes(Path("/proc/self/stat").read_bytes())
    status = Path("/proc/self/status").read_bytes().partition(b"\n")[2]
    (folder / "status").write_bytes(b"Name:\t" + name.encode() + b"\n" + status)
    (folder / "cgroup").write_bytes(cgroup.encode() + b"\n")
    return folder


def test_a_folder_of_a_delegated_control_group_is_no_job(tmp_path: Path, end: str) -> None:
    process(tmp_path, cgroup=f"{OWN_GROUP}{end}0::/system.slice/slurmstepd.scope/job_42/step_0")
    assert process_info.job_of(PID, tmp_path) is None
    assert process_info.jobs_of(os.geteuid(), tmp_path) == frozenset()


def test_nor_does_it_make_anybody_the_owner_of_one(tmp_path: Path, end: str) -> None:
    process(tmp_path, cgroup=f"{OWN_GROUP}{end}4:memory:/slurm/uid_{os.geteuid()}/job_42/step_0")
    assert process_info.jobs_of(os.geteuid(), tmp_path) == frozenset()


def test_it_is_no_pod(tmp_path: Path, end: str) -> None:
    process(tmp_path, cgroup=f"{OWN_GROUP}{end}0::/kubepods/pod{POD}/x")
    assert pod_in(read_cgroups(PID, tmp_path)) == ""


def test_a_name_of_a_process_gives_it_no_other_user_or_number(tmp_path: Path, end: str) -> None:
    folder = process(tmp_path, name=f"x{end}Uid:\t5 5 5 5{end}NSpid:\t77")
    key = ProcessKey(PID, start_time_ns(PID, tmp_path))
    found = identity_of(key, tmp_path)
    found.close()
    assert found.uid == os.geteuid()
    assert proxy_agent.inner_number(folder / "status", 1) == proxy_agent.inner_number(Path("/proc/self/status"), 1)
    assert _head(folder / "status")["Uid"][1] == str(os.geteuid())


def test_a_file_that_is_mapped_adds_no_mapping(tmp_path: Path, end: str) -> None:
    folder = process(tmp_path)
    path = f"/tmp/x{end}500000-600000 r-xp 00000000 08:01 9 /usr/lib/libc.so.6"
    (folder / "maps").write_bytes(f"400000-401000 r-xp 00000000 08:01 7    {path}\n".encode())
    assert [each.path for each in target_image.read_maps(PID, tmp_path)] == [path]


def test_lines_end_where_the_kernel_ends_them() -> None:
    assert lines(b"a\rb\x0cc\nd\xff\n") == ["a\rb\x0cc", "d\ufffd", ""]


def test_a_process_whose_status_says_no_user_owns_no_job_and_hides_no_other(tmp_path: Path) -> None:
    folder = process(tmp_path, cgroup="0::/system.slice/slurmstepd.scope/job_42/step_0")
    other = tmp_path / "1"
    other.mkdir()
    for name in ("stat", "status", "cgroup"):
        (other / name).write_bytes((folder / name).read_bytes())
    (folder / "status").write_bytes(b"Name:\tpython3\n")
    assert process_info.jobs_of(os.geteuid(), tmp_path) == (frozenset({"42"}) if os.geteuid() else frozenset())
