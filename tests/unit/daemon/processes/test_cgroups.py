"""Which folders the control groups of a process are, and whether one of them freezes it."""

from pathlib import Path

import pytest
from kinetod.processes.cgroups import V1, V2, frozen_by, groups
from support.machine import cgroups
from support.machine.cgroups import Written
from support.service import subjects
from support.waiting import until


@pytest.mark.parametrize("version", [V1, V2])
def test_a_group_and_all_above_it_are_found(tmp_path: Path, version: int) -> None:
    made = Written(tmp_path, version=version)
    found = groups(7, "memory", made.proc)
    assert [group.path for group in found] == ["/jobs/one", "/jobs", "/"]
    assert found[0].folder == made.top / "jobs/one"


def test_a_controller_of_version_1_goes_before_version_2(tmp_path: Path) -> None:
    made = Written(tmp_path, version=V1)
    assert [group.version for group in groups(7, "memory", made.proc)] == [V1, V1, V1]
    assert groups(7, "pids", made.proc) == []  # in version 2, which is not mounted


def test_of_a_mounted_part_only_that_part_is_seen(tmp_path: Path) -> None:
    made = Written(tmp_path, version=V2, root="/jobs")
    (made.top / "one").mkdir()
    assert [group.path for group in groups(7, "memory", made.proc)] == ["/jobs/one", "/jobs"]


@pytest.mark.parametrize("path", ["/../other", "/elsewhere"])
def test_a_group_outside_of_what_is_mounted_is_not_known(tmp_path: Path, path: str) -> None:
    made = Written(tmp_path, version=V2)
    made.write(made.proc / "7/cgroup", f"0::{path}\n")
    assert groups(7, "memory", made.proc) == []


def test_a_process_that_is_not_there_is_in_no_group(tmp_path: Path) -> None:
    assert groups(8, "memory", Written(tmp_path, version=V2).proc) == []


def test_the_group_that_freezes_is_named_and_not_the_one_below_it(tmp_path: Path) -> None:
    made = Written(tmp_path, version=V2)
    made.group("jobs/one", {"cgroup.events": "populated 1\nfrozen 1", "cgroup.freeze": 0})
    made.group("jobs", {"cgroup.events": "populated 1\nfrozen 1", "cgroup.freeze": 1})
    assert frozen_by(7, made.proc) == str(made.top / "jobs/cgroup.freeze")


@pytest.mark.parametrize("version", [V1, V2])
def test_a_real_frozen_group_is_found(version: int) -> None:
    with subjects.python() as pid, cgroups.real_group("freezer", f"kineto-frozen-{pid}", version=version) as group:
        group.add(pid)
        assert frozen_by(pid) == ""
        with cgroups.frozen(group) as file:
            until(lambda: frozen_by(pid) == file, "it is frozen")
        until(lambda: frozen_by(pid) == "", "it goes on")
