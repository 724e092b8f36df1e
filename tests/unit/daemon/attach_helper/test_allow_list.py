import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kinetod.attach_helper import allow_list
from kinetod.attach_helper.allow_list import ProcessOwner
from kinetod.base.policy_file import PolicyError
from kinetod.processes import credentials
from kinetod.processes.credentials import Credentials
from support.service.approvals import PLAIN
from support.waiting import until

EXAMPLE = Path(__file__).parents[4] / "deploy/config/attach.toml"
ADA = 1000
USERS = {"kineto": 990, "ada": ADA, "bob": 1001}


def loaded(tmp_path: Path, text: str) -> allow_list.Policy:
    path = tmp_path / "attach.toml"
    path.write_text(text)
    path.chmod(0o644)
    return allow_list.load(path, uid_of=USERS.__getitem__)


def plain(*uids: int) -> ProcessOwner:
    return ProcessOwner(uids * 4 if len(uids) == 1 else uids, container=False)


def test_by_default_the_front_end_may_enter_everybodys_processes_but_roots(tmp_path: Path) -> None:
    found = loaded(tmp_path, "")
    assert found.refuses_caller(990) == "" == found.refuses_caller(0)
    assert "uid 1000 is not allowed to use" in found.refuses_caller(1000)
    assert found.refuses_owner(plain(1000)) == ""
    assert "outside containers" in found.refuses_owner(plain(0))
    assert found.refuses_owner(ProcessOwner((0, 0, 0, 0), container=True)) == ""


def test_the_file_that_is_installed_says_the_defaults(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=\w+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert len(re.findall(r"^\w+ = ", text, re.MULTILINE)) == 6
    with_all = loaded(tmp_path, text)
    assert with_all == loaded(tmp_path, EXAMPLE.read_text())


def test_a_program_that_has_changed_its_rights_is_none_of_who_started_it(tmp_path: Path) -> None:
    found = loaded(tmp_path, "")
    assert found.refuses_owner(plain(1000, 0, 0, 0))
    assert found.refuses_owner(plain(1000, 1000, 0, 1000))
    assert loaded(tmp_path, "users = [1000]").refuses_owner(plain(1000, 1001, 1001, 1001))


def test_by_default_the_hosts_own_accounts_are_left_alone(tmp_path: Path) -> None:
    assert "processes of uid 999 are left alone" in loaded(tmp_path, "").refuses_owner(plain(999))
    assert loaded(tmp_path, 'users = ["*"]').refuses_owner(plain(999)) == ""


@pytest.mark.parametrize(
    ("text", "administrator", "allowed"),
    [
        ("", False, False),
        ("", True, True),
        ('protected = "never"', True, False),
        ('protected = "always"', False, True),
    ],
)
def test_protected_processes_are_for_administrators_unless_the_policy_says_otherwise(
    tmp_path: Path, text: str, administrator: bool, allowed: bool
) -> None:
    protected = ProcessOwner((1000,) * 4, container=False, protected="it is not dumpable")
    why = loaded(tmp_path, text).refuses_owner(protected, administrator=administrator)
    assert (why == "") is allowed, why
    assert allowed or "it is protected: it is not dumpable" in why
    who = "nobody" if "never" in text else "only administrators"
    assert allowed or f"{who} can attach to such processes (" in why


def test_the_helpers_own_processes_are_never_entered(tmp_path: Path) -> None:
    found = replace(loaded(tmp_path, 'users = ["*"]\nprotected = "always"'), own_uid=991)
    assert "the attach helper itself" in found.refuses_owner(plain(991), administrator=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"uids": (1000, 1001, 1001, 1001)}, "change its user"),
        ({"gids": (1000, 42, 42, 42)}, "change its user or group"),
        ({"dumpable": False}, "not dumpable"),
        ({"capabilities": 1 << 13}, "has capabilities"),
        ({}, ""),
    ],
)
def test_a_process_that_its_user_could_not_trace_is_protected(changes: dict[str, Any], why: str) -> None:
    found = allow_list.owner(os.getpid(), replace(PLAIN, **changes)).protected
    assert why in found and bool(found) == bool(why)


def test_the_front_ends_own_processes_are_never_entered(tmp_path: Path) -> None:
    assert "is a caller of the helper" in loaded(tmp_path, "").refuses_owner(plain(990))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('users = ["ada"]', {1000}),
        ("users = [1001]", {1001}),
        ('users = ["1000-1001"]', {1000, 1001}),
        ('users = ["*"]\ndenied_users = ["ada"]', {1001, 1002}),
        ("users = []", set()),
        ('root = "always"', {0, 1000, 1001, 1002}),
        ('users = []\nroot = "always"', {0}),
        ('root = "never"', {1000, 1001, 1002}),
    ],
)
def test_users_are_names_numbers_ranges_or_everybody(tmp_path: Path, text: str, allowed: set[int]) -> None:
    found = loaded(tmp_path, text)
    assert {uid for uid in (0, 1000, 1001, 1002) if not found.refuses_owner(plain(uid))} == allowed


def test_root_in_a_container_is_left_alone_too_if_the_policy_says_so(tmp_path: Path) -> None:
    why = loaded(tmp_path, 'root = "never"').refuses_owner(ProcessOwner((0, 0, 0, 0), container=True))
    assert why.startswith("processes of root are left alone")


def test_a_process_whose_owner_is_not_known_is_left_alone(tmp_path: Path) -> None:
    found = loaded(tmp_path, 'users = ["*"]\nroot = "always"\nprotected = "always"')
    assert found.refuses_owner(plain()) == "its owner cannot be determined"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('callers = ["*"]', "callers: must name individual users"),
        ('callers = ["nobody-here"]', "there is no user 'nobody-here'"),
        ('users = ["9-1"]', "is not a valid range"),
        ('users = "ada"', "users"),
        ('root = "sometimes"', "root: must be"),
        ('protected = "sometimes"', "protected: must be"),
        ("user = []", "user"),
        ("users = [", "attach.toml"),
    ],
)
def test_a_mistake_refuses_everything_and_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        loaded(tmp_path, text)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_of_another_user_is_no_policy(tmp_path: Path) -> None:
    loaded(tmp_path, "")
    os.chown(tmp_path / "attach.toml", 1000, 1000)
    with pytest.raises(PolicyError, match="is writable by users other than root"):
        allow_list.load(tmp_path / "attach.toml")


def test_the_owner_is_what_the_kernel_says() -> None:
    assert allow_list.owner(os.getpid(), credentials.read(os.getpid())) == ProcessOwner(
        (os.getuid(), *(os.geteuid(),) * 3), container=False
    )


def rights(uid: int, capabilities: int = 1 << 13) -> Credentials:
    return replace(PLAIN, uids=(uid,) * 4, capabilities=capabilities)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_namespace_of_ones_own_or_of_a_container_protects_nobody() -> None:
    command = ("unshare", "--user", "--pid", "--fork", "--kill-child", "sleep", "100")
    with subprocess.Popen(command, user=ADA, group=ADA) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            (first,) = until(lambda: children.read_text().split(), "the namespace has its first process")
            outside = allow_list.owner(process.pid, rights(ADA))  # of the PID namespace
            assert (outside.container, outside.protected) == (False, "")
            for uid in (0, 1001):
                protected = allow_list.owner(process.pid, rights(uid)).protected
                assert protected == "it is in another user's user namespace"
            contained = allow_list.owner(int(first), rights(1001))
            assert (contained.container, contained.protected) == (True, "")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("given", "why"), [(rights(1000), "it has capabilities"), (rights(1000, 0), ""), (rights(0), "")]
)
def test_a_process_whose_namespaces_cannot_be_read_is_in_those_of_the_host(
    tmp_path: Path, given: Credentials, why: str
) -> None:
    assert allow_list.owner(os.getpid(), given, tmp_path) == ProcessOwner(given.uids, container=False, protected=why)


def test_the_kubelets_socket_is_an_absolute_path_or_none(tmp_path: Path) -> None:
    assert loaded(tmp_path, "").kubelet_socket is None
    assert loaded(tmp_path, 'kubelet_socket = "/run/kubelet.sock"').kubelet_socket == Path("/run/kubelet.sock")
    with pytest.raises(PolicyError, match="kubelet_socket: must be an absolute path"):
        loaded(tmp_path, 'kubelet_socket = "kubelet.sock"')
