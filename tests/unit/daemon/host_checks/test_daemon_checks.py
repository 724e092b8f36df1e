"""The daemon's rights on this host."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from kinetod.attach.attach_types import Finding, Status
from kinetod.attach.inspect.process_inspection import Seccomp
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.daemon_checks import Rights, check_store, read, rights_findings
from support.service.subjects import own_facts

EVERYTHING = frozenset({"CAP_SYS_PTRACE", "CAP_SYS_ADMIN", "CAP_DAC_READ_SEARCH"})


def store_found(store: Path, needed: int = 0) -> Finding:
    (one,) = check_store(CheckQuestion(daemon_pid=1, store=str(store), needed_bytes=needed, helper=False))
    return one


def test_a_disk_with_room_is_in_order(tmp_path: Path) -> None:
    assert store_found(tmp_path).status is Status.OK


def test_too_little_room_is_a_problem_and_little_more_a_note(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert store_found(tmp_path, 2 * free).status is Status.PROBLEM
    assert store_found(tmp_path, free // 2).status is Status.NOTE


def test_a_disk_without_room_for_files_or_that_is_read_only_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"f_bavail": 10**9, "f_frsize": 4096, "f_blocks": 10**9, "f_files": 10**6, "f_favail": 10, "f_flag": 0}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**disk))
    assert (store_found(tmp_path).status, "10 more files" in store_found(tmp_path).detail) == (Status.PROBLEM, True)
    disk |= {"f_favail": 10**6, "f_flag": os.ST_RDONLY}
    assert (store_found(tmp_path).status, "is not writable" in store_found(tmp_path).detail) == (Status.PROBLEM, True)


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    assert store_found(tmp_path / "none").detail == f"{tmp_path}/none: No such file or directory"


def question(**changes: object) -> CheckQuestion:
    values = {"daemon_pid": 1, "store": "/", "needed_bytes": 0, "helper": False}
    return CheckQuestion(**{**values, **changes})  # type: ignore[arg-type]


def found(
    name: str, asked: CheckQuestion | None = None, rights: Mapping[str, object] | None = None, **own: object
) -> Finding:
    facts = Rights(**{"own": own_facts(**own), "foreign": (), **(rights or {})})  # type: ignore[arg-type]
    (one,) = (each for each in rights_findings(facts, asked or question()) if each.name == name)
    return one


def test_this_process_is_read() -> None:
    assert [each.name for each in rights_findings(read(), question())] == [
        *("permissions", "ptrace_scope", "seccomp", "namespaces", "python")
    ]


@pytest.mark.parametrize(
    ("own", "asked", "status", "says"),
    [
        ({"uid": 0, "capabilities": EVERYTHING}, {}, Status.OK, "root with all"),
        ({"uid": 0, "capabilities": EVERYTHING - {"CAP_SYS_PTRACE"}}, {}, Status.NOTE, "without CAP_SYS_PTRACE"),
        ({"uid": 1000, "capabilities": frozenset()}, {}, Status.OK, "that user's own processes"),
        ({"uid": 990, "capabilities": frozenset()}, {"helper": True}, Status.OK, "the attach helper attaches"),
        ({"uid": 0, "capabilities": EVERYTHING}, {"attaching": False}, Status.NOTE, "does not inject agents"),
    ],
)
def test_permissions(own: dict[str, object], asked: dict[str, object], status: Status, says: str) -> None:
    one = found("permissions", question(**asked), None, **own)
    assert (one.status, says in one.detail) == (status, True)


@pytest.mark.parametrize(
    ("scope", "capabilities", "helper", "status"),
    [
        (None, frozenset(), False, Status.OK),
        (0, frozenset(), False, Status.OK),
        (1, frozenset(), False, Status.PROBLEM),
        (2, frozenset(), False, Status.PROBLEM),
        (1, EVERYTHING, False, Status.OK),
        (1, frozenset(), True, Status.OK),
        (3, EVERYTHING, True, Status.PROBLEM),
    ],
)
def test_yamas_rule_matters_unless_the_daemon_is_exempt(
    scope: int | None, capabilities: frozenset[str], helper: bool, status: Status
) -> None:
    one = found("ptrace_scope", question(helper=helper), ptrace_scope=scope, capabilities=capabilities)
    assert one.status is status
    assert bool(one.advice) == (status is Status.PROBLEM)


@pytest.mark.parametrize(
    ("mode", "helper", "status"), [(0, False, Status.OK), (2, True, Status.OK), (2, False, Status.NOTE)]
)
def test_a_filter_of_ones_own_costs_those_of_others(mode: int, helper: bool, status: Status) -> None:
    assert found("seccomp", question(helper=helper), seccomp=Seccomp(mode=mode, filters=1)).status is status


@pytest.mark.parametrize(
    ("foreign", "status", "says"),
    [
        ((), Status.OK, "the host's"),
        (None, Status.UNKNOWN, "is not allowed to read its namespaces"),
        (("pid", "cgroup"), Status.NOTE, "only the processes of its own container"),
        (("user",), Status.NOTE, "root in it has no rights outside"),
    ],
)
def test_namespaces(foreign: tuple[str, ...] | None, status: Status, says: str) -> None:
    one = found("namespaces", rights={"foreign": foreign})
    assert (one.status, says in one.detail) == (status, True)


@pytest.mark.parametrize(
    ("python", "has_gil", "status"),
    [((3, 11, 7), True, Status.OK), ((3, 99, 0), True, Status.NOTE), ((3, 14, 0), False, Status.NOTE)],
)
def test_the_daemons_python(python: tuple[int, int, int], has_gil: bool, status: Status) -> None:
    assert found("python", rights={"python": python, "has_gil": has_gil}).status is status
