"""The script's file: made and removed as the process itself would, nowhere else."""

import os
import stat
from pathlib import Path
from typing import List

import pytest
from kinetod.attach import script_file

PID = 7


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root file system of a process that /proc shows."""
    root = tmp_path / "root"
    (root / "tmp").mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    folder = tmp_path / "proc" / str(PID)
    folder.mkdir(parents=True)
    (folder / "root").symlink_to(root)
    (folder / "cwd").symlink_to("/work")
    (root / "work").mkdir()
    uid, gid = os.getuid(), os.getgid()
    (folder / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{gid}\t{gid}\t{gid}\t{gid}\n")
    return root


def place(root: Path, content: bytes = b"pass") -> script_file.ScriptFile:
    noted: List[str] = []
    file = script_file.place(PID, 12, content, noted.append, proc=root.parent / "proc")
    assert noted[-1] == file.path
    return file


def test_it_lies_in_the_process_s_own_tmp_and_only_its_owner_can_read_it(root: Path) -> None:
    file = place(root, b"print(1)")
    assert file.path == "/tmp/.kineto-attach-12.py"
    made = root / "tmp" / ".kineto-attach-12.py"
    assert made.read_bytes() == b"print(1)"
    assert stat.S_IMODE(made.stat().st_mode) == 0o400
    assert made.stat().st_uid == os.getuid()


def test_it_is_removed(root: Path) -> None:
    script_file.remove(PID, place(root).path, proc=root.parent / "proc")
    assert list((root / "tmp").iterdir()) == []


def test_a_link_in_a_container_does_not_lead_out_of_it(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "etc"
    outside.mkdir()
    (root / "tmp").rmdir()
    (root / "tmp").symlink_to(outside)  # there is no such folder below the process's root
    assert place(root).path == "/work/.kineto-attach-12.py"
    assert list(outside.iterdir()) == []


def test_a_link_inside_the_container_is_followed(root: Path) -> None:
    (root / "tmp").rename(root / "scratch")
    (root / "tmp").symlink_to("/scratch")
    assert place(root).path == "/tmp/.kineto-attach-12.py"
    assert [path.name for path in (root / "scratch").iterdir()] == [".kineto-attach-12.py"]


def test_a_file_that_is_there_is_not_written_to(root: Path) -> None:
    (root / "tmp" / ".kineto-attach-12.py").write_text("theirs")
    assert place(root).path == "/work/.kineto-attach-12.py"
    assert (root / "tmp" / ".kineto-attach-12.py").read_text() == "theirs"


def test_a_directory_in_which_others_may_replace_the_file_is_not_used(root: Path) -> None:
    (root / "tmp").chmod(0o777)
    assert place(root).path == "/work/.kineto-attach-12.py"


def test_no_place_at_all_is_the_first_place_s_error(root: Path) -> None:
    (root / "work").rmdir()
    (root / "tmp").chmod(0o777)
    with pytest.raises(PermissionError, match="others may replace files"):
        place(root)


@pytest.mark.parametrize("path", ["/tmp/users.py", "/tmp/.kineto-attach-x.py", ".kineto-attach-1.py", ""])
def test_only_such_files_are_ever_removed(root: Path, path: str) -> None:
    (root / "tmp" / "users.py").touch()
    (root / "tmp" / ".kineto-attach-x.py").touch()
    script_file.remove(PID, path, proc=root.parent / "proc")
    assert len(list((root / "tmp").iterdir())) == 2


def test_a_process_that_is_gone_has_nothing_to_remove(root: Path) -> None:
    script_file.remove(8, "/tmp/.kineto-attach-1.py", proc=root.parent / "proc")


def test_the_path_is_told_before_there_is_a_file(root: Path) -> None:
    def killed(path: str) -> None:
        assert not (root / path[1:]).exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        script_file.place(PID, 12, b"", killed, proc=root.parent / "proc")
    assert list((root / "tmp").iterdir()) == []
