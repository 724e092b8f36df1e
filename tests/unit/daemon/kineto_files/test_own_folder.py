"""Our own folder in somebody else's: who may write there, what counts as ours, and what is removed."""

import errno
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.kineto_files import own_folder

NAME = "kinetod-00000001-0123456789abcdef"
FILE = "kinetod-c1-00_7.json"
OTHER_UID = os.geteuid() + 4321


def descriptors() -> list[Path]:
    return sorted(Path("/proc/self/fd").iterdir())


@pytest.fixture
def outer(tmp_path: Path) -> Iterator[int]:
    descriptor, before = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY), descriptors()
    yield descriptor
    assert descriptors() == before  # nothing is left open
    os.close(descriptor)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_access_list_lets_one_user_write_and_nobody_look(outer: int, tmp_path: Path) -> None:
    name, descriptor = own_folder.make(outer, OTHER_UID, 1_800_000_000)
    os.close(descriptor)
    assert own_folder.until_s(name) == 1_800_000_000
    assert mode(tmp_path / name) == 0o1730
    listed = os.getxattr(tmp_path / name, "system.posix_acl_access")
    entries = list(struct.iter_unpack("<HHI", listed[4:]))  # kind, rights, uid
    nobody = 0xFFFFFFFF
    assert entries == [(1, 7, nobody), (2, 3, OTHER_UID), (4, 0, nobody), (16, 3, nobody), (32, 0, nobody)]


def test_without_lists_everybody_may_write_and_nobody_list(
    outer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", unsupported)
    name, descriptor = own_folder.make(outer, OTHER_UID, 1)
    os.close(descriptor)
    assert mode(tmp_path / name) == 0o1733


def test_a_folder_for_our_own_user_is_for_nobody_else(outer: int, tmp_path: Path) -> None:
    name, descriptor = own_folder.make(outer, os.geteuid(), 1)
    os.close(descriptor)
    assert mode(tmp_path / name) == 0o1700


def test_a_folder_is_opened_again_and_removed_once(outer: int, tmp_path: Path) -> None:
    name, descriptor = own_folder.make(outer, OTHER_UID, 1)
    again = own_folder.reopen(outer, name)
    assert os.path.samestat(os.fstat(again), os.fstat(descriptor))
    own_folder.remove(again, name)
    own_folder.remove(descriptor, name)
    assert not list(tmp_path.iterdir())
    os.close(again)
    os.close(descriptor)


@pytest.mark.parametrize("name", ["..", "kinetod-1-2", NAME + "/..", "kinetod-00000001-0123456789abcdeg", NAME + "\n"])
def test_what_has_no_name_of_ours_is_not_opened(outer: int, name: str) -> None:
    with pytest.raises(own_folder.NotOurs):
        own_folder.reopen(outer, name)


def test_what_is_mounted_in_the_place_of_ours_is_not_opened(outer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, descriptor = own_folder.make(outer, OTHER_UID, 1)
    os.close(descriptor)
    monkeypatch.setattr(own_folder, "mount_id", lambda opened: opened)
    with pytest.raises(own_folder.NotOurs, match=f"{name} is not a folder that kinetod created"):
        own_folder.reopen(outer, name)


def test_a_folder_that_cannot_be_finished_is_removed(
    outer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="cannot"):
        patch.setattr(os, "fchmod", lambda *_: (_ for _ in ()).throw(OSError("cannot")))
        own_folder.make(outer, OTHER_UID, 1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_finished_is_not_opened_again(outer: int, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(0o700)
    with pytest.raises(own_folder.NotOurs):
        own_folder.reopen(outer, NAME)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have another user's folder")
def test_a_folder_of_another_user_is_not_opened(outer: int, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME).chmod(0o1733)
    os.chown(tmp_path / NAME, OTHER_UID, OTHER_UID)
    with pytest.raises(own_folder.NotOurs):
        own_folder.reopen(outer, NAME)


def test_a_link_in_a_folders_place_is_not_followed(outer: int, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / NAME).symlink_to("real")
    with pytest.raises(NotADirectoryError):
        own_folder.reopen(outer, NAME)


def test_an_older_folder_of_ours_is_not_taken_for_the_new_one(
    outer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, descriptor = own_folder.make(outer, OTHER_UID, 1)
    os.close(descriptor)
    mkdir = os.mkdir

    def swapped(name: str, bits: int, *, dir_fd: int) -> None:
        mkdir(name, bits, dir_fd=dir_fd)
        (tmp_path / name).rmdir()
        (tmp_path / old).rename(tmp_path / name)

    monkeypatch.setattr(os, "mkdir", swapped)
    with pytest.raises(own_folder.NotOurs):
        own_folder.make(outer, OTHER_UID + 1, 1)


def test_another_folder_with_the_same_name_is_not_removed(outer: int, tmp_path: Path) -> None:
    name, descriptor = own_folder.make(outer, OTHER_UID, 1)
    (tmp_path / name).rename(tmp_path / "moved")
    (tmp_path / name).mkdir()
    own_folder.remove(descriptor, name)
    os.close(descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "moved"])


def test_old_folders_go_with_their_files_and_nothing_else_does(outer: int, tmp_path: Path) -> None:
    def made(until: int, *files: str) -> Path:
        name, descriptor = own_folder.make(outer, OTHER_UID, until)
        os.close(descriptor)
        for file in files:
            (tmp_path / name / file).touch()
        return tmp_path / name

    gone = [made(99, FILE, f"{FILE}.tmp"), made(98)]
    wanted, littered = made(100, FILE), made(99, FILE, "litter")
    foreign = tmp_path / "kinetod-not-ours"
    foreign.mkdir()
    own_folder.sweep(outer, 100)
    assert not any(path.exists() for path in gone)
    assert (wanted / FILE).exists()
    assert [path.name for path in littered.iterdir()] == ["litter"]
    assert foreign.exists()


def test_only_so_many_old_folders_are_removed_at_a_time(
    outer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        os.close(own_folder.make(outer, OTHER_UID, 1)[1])
    monkeypatch.setattr(own_folder, "MAX_LISTED", 2)
    own_folder.sweep(outer, 2)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(own_folder, "MAX_SWEPT", 0)
    own_folder.sweep(outer, 2)
    assert len(list(tmp_path.iterdir())) == 1
