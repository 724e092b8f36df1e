"""Files of policy that only root can have written, and the users that they name."""

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from kinetod.base.policy_file import MAX_FILE_BYTES, CallersAndUsers, PolicyError, Uids, read_policy, users_of

LAST_UID = 2**32 - 2
NAMES = {"a-1": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.toml"


def test_everybody_is_everybody_but_root() -> None:
    everybody, some = Uids(everybody=True), Uids(ranges=((5, 7),))
    assert [uid in everybody for uid in (0, 1, LAST_UID)] == [False, True, True]
    assert [uid in some for uid in (0, 4, 5, 7, 8)] == [False, False, True, True, False]
    assert 1 not in Uids()


def test_names_are_those_of_this_host(path: Path) -> None:
    root = pwd.getpwuid(0).pw_name
    assert users_of(CallersAndUsers(callers=[root]), path).callers == Uids(ranges=((0, 0),))
    with pytest.raises(PolicyError, match="callers: there is no user 'nobody-of-this-name'"):
        users_of(CallersAndUsers(callers=["nobody-of-this-name"]), path)


@pytest.mark.parametrize(
    ("entry", "found"),
    [(7, (7, 7)), ("7", (7, 7)), ("7-7", (7, 7)), ("0-9", (0, 9)), (f"1-{LAST_UID}", (1, LAST_UID)), ("a-1", (3, 3))],
)
def test_a_user_is_a_number_a_range_or_a_name(path: Path, entry: str | int, found: tuple[int, int]) -> None:
    users = users_of(CallersAndUsers(callers=[], users=[entry], denied_users=[entry]), path, NAMES.__getitem__)
    assert users.users == users.denied == Uids(ranges=(found,))


@pytest.mark.parametrize("entry", ["7-", "-7", "7-x", "7-\u0668", "\u0667", "\u0667-8", "", -1])
def test_what_is_neither_is_looked_up_as_a_name(path: Path, entry: str | int) -> None:
    with pytest.raises(PolicyError, match=f"users: there is no user '{entry}'"):
        users_of(CallersAndUsers(callers=[], users=[entry]), path, NAMES.__getitem__)


@pytest.mark.parametrize("entry", ["9-8", f"1-{LAST_UID + 1}", LAST_UID + 1])
def test_a_range_that_holds_nobody_or_too_many_is_refused(path: Path, entry: str | int) -> None:
    with pytest.raises(PolicyError, match=f"denied_users: '{entry}' is not a valid range of user ids"):
        users_of(CallersAndUsers(callers=[], denied_users=[entry]), path)


def test_not_everybody_may_ask(path: Path) -> None:
    with pytest.raises(PolicyError, match="callers: must name individual users"):
        users_of(CallersAndUsers(callers=["*"]), path)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "No such file or directory; without this file no caller is served"),
        (lambda path: os.mkfifo(path, 0o600), "is not a regular file"),
        (lambda path: path.mkdir(0o700), "is not a regular file"),
        (lambda path: path.write_text("#" * (MAX_FILE_BYTES + 1)), f"is longer than {MAX_FILE_BYTES} bytes"),
        (lambda path: path.write_text("nonsense = 1"), "unknown field `nonsense`"),
        (lambda path: path.write_bytes(b"\xff"), "codec can't decode"),
    ],
    ids=["nothing", "fifo", "folder", "long", "nonsense", "no text"],
)
def test_what_is_no_policy_is_refused_and_closed(path: Path, make: Callable[[Path], None], problem: str) -> None:
    make(path)
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(PolicyError, match=f"^{path}.*{problem}"):
        read_policy(path, CallersAndUsers)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_file_may_be_as_long_as_the_limit(path: Path) -> None:
    path.write_text("#" * MAX_FILE_BYTES)
    assert read_policy(path, CallersAndUsers) == CallersAndUsers()


def test_a_file_that_cannot_be_read_serves_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("")

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(PolicyError, match=f"^{path}: Input/output error; without this file no caller is served"):
        read_policy(path, CallersAndUsers)


@pytest.mark.parametrize(("mode", "taken"), [(0o644, True), (0o664, False), (0o646, False), (0o444, True)])
def test_a_file_that_others_can_write_is_refused(path: Path, mode: int, taken: bool) -> None:
    path.write_text("")
    path.chmod(mode)
    if taken:
        assert read_policy(path, CallersAndUsers) == CallersAndUsers()
    else:
        with pytest.raises(PolicyError, match=f"writable by users other than root; run chown root {path}"):
            read_policy(path, CallersAndUsers)
