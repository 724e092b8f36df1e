"""What a process may have put where its libkineto writes, and what is fetched of it."""

import gc
import os
from pathlib import Path

import pytest
from kinetod.kineto_files.interface import (
    FileRefused,
    FileTooLarge,
    FolderUnreachable,
    Sight,
)
from kinetod.kineto_files.trace_folder import TraceFolder, copy_file
from kinetod.processes.identity import ProcessKey, start_time_ns

OWN = ProcessKey(os.getpid(), start_time_ns(os.getpid()))
NAME = "kinetod-c1_7.json"
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> TraceFolder:
    return TraceFolder.open(OWN, str(tmp_path), os.geteuid())


def test_the_file_is_seen_while_it_is_written_and_when_it_is_whole(folder: TraceFolder, tmp_path: Path) -> None:
    assert folder.look(NAME) == Sight(None, whole=False)
    (tmp_path / f"{NAME}.tmp").write_text("{")
    assert folder.look(NAME) == Sight(1, whole=False)
    (tmp_path / f"{NAME}.tmp").rename(tmp_path / NAME)
    assert folder.look(NAME) == Sight(None, whole=True)


def test_it_is_copied_byte_for_byte_and_removed(folder: TraceFolder, tmp_path: Path) -> None:
    data = os.urandom(3 * MIB + 1)
    (tmp_path / NAME).write_bytes(data)
    sizes: list[int] = []
    assert copy_file(folder.open_file(NAME), tmp_path / "copy", max_bytes=4 * MIB, on_bytes=sizes.append) == len(data)
    assert (tmp_path / "copy").read_bytes() == data
    assert sizes == [MIB, 2 * MIB, 3 * MIB, len(data)]
    (tmp_path / f"{NAME}.tmp").write_text("of a recording that was broken off")
    folder.remove(NAME)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
    folder.remove(NAME)


def test_a_file_beyond_the_limit_is_not_copied_further(folder: TraceFolder, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(bytes(MIB + 1))
    with pytest.raises(FileTooLarge):
        copy_file(folder.open_file(NAME), tmp_path / "copy", max_bytes=MIB)


def test_a_link_is_refused_wherever_it_leads(folder: TraceFolder, tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to("/etc/hostname")
    with pytest.raises(FileRefused, match="symbolic link"):
        copy_file(folder.open_file(NAME), tmp_path / "copy", max_bytes=MIB)
    folder.remove(NAME)
    assert (tmp_path / NAME).is_symlink()


def test_what_is_no_regular_file_is_refused(folder: TraceFolder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(FileRefused, match="is not a regular file"):
        copy_file(folder.open_file(NAME), tmp_path / "copy", max_bytes=MIB)


def test_a_file_with_a_second_name_is_refused(folder: TraceFolder, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}")
    (tmp_path / NAME).hardlink_to(tmp_path / "other")
    with pytest.raises(FileRefused, match="has 2 hard links"):
        copy_file(folder.open_file(NAME), tmp_path / "copy", max_bytes=MIB)


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{}")
    folder = TraceFolder.open(OWN, str(tmp_path), os.geteuid() + 1)
    with pytest.raises(FileRefused, match="belongs to uid"):
        copy_file(folder.open_file(NAME), tmp_path / "copy", max_bytes=MIB)


def test_a_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(FolderUnreachable, match="is or contains a symbolic link"):
        TraceFolder.open(OWN, str(tmp_path / "link"), os.geteuid())


def test_the_folder_of_a_process_that_has_ended_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderUnreachable, match="has ended"):
        TraceFolder.open(ProcessKey(os.getpid(), OWN.start_time_ns + 1), str(tmp_path), os.geteuid())


def test_an_error_while_copying_leaves_no_descriptor_open(folder: TraceFolder, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{}")
    gc.collect()  # what other tests have left
    before = len(list(Path("/proc/self/fd").iterdir()))

    def full(_size: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        copy_file(folder.open_file(NAME), tmp_path / "copy", max_bytes=MIB, on_bytes=full)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    folder.close()
    folder.close()
