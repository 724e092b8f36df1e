"""Temporary folders: nothing is left of one into which a thread is still writing."""

import threading
from pathlib import Path

from kinetoctl.base.temporary_folders import removable_folder
from support.waiting import scaled, until

FOLDERS = 30


def test_a_folder_and_what_is_in_it_exist_for_the_duration_of_the_block(tmp_path: Path) -> None:
    with removable_folder("some-", tmp_path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner/file").write_text("x")
        assert folder.parent == tmp_path
        assert folder.name.startswith("some-")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_while_a_thread_goes_on_writing(tmp_path: Path) -> None:
    for _ in range(FOLDERS):
        failed: list[OSError] = []

        def write(folder: Path, failed: list[OSError] = failed) -> None:
            number = 0
            try:
                while True:
                    (folder / str(number)).mkdir()
                    (folder / str(number) / "file").write_text("x")
                    number += 1
            except OSError as exc:
                failed.append(exc)

        with removable_folder("some-", tmp_path) as folder:
            writer = threading.Thread(target=write, args=(folder,))
            writer.start()
            until((folder / "20").exists, "the thread writes")
        writer.join(scaled(10.0))
        assert len(failed) == 1
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_else_has_removed_is_no_failure(tmp_path: Path) -> None:
    with removable_folder("some-", tmp_path) as folder:
        folder.rmdir()
    assert list(tmp_path.iterdir()) == []
