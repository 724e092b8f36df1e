"""Files that others could change are named, with the command that helps. As root: files of others can be made."""

import os
from pathlib import Path

import pytest
from kinetod.plugins.file_trust import problem_of, trusted_uids

OWN = frozenset((0, os.geteuid()))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "package"
    (folder / "inner").mkdir(parents=True)
    for file in (folder / "__init__.py", folder / "inner" / "source.py"):
        file.write_text("")
    for place in (tmp_path, tmp_path / "site", folder, folder / "inner", *folder.rglob("*.py")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    return folder


def test_files_that_only_root_and_this_user_can_change_are_trusted(package: Path) -> None:
    assert problem_of([package], trusted_uids()) == ""
    assert trusted_uids() == OWN


@pytest.mark.parametrize("place", ["", "inner", "inner/source.py", "..", "../.."])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_a_place_that_others_can_write_to_is_named(package: Path, place: str, mode: int) -> None:
    spoiled = (package / place).resolve()
    spoiled.chmod(0o755 | mode)
    problem = problem_of([package], OWN)
    assert problem == f"{spoiled} can be changed by others (mode {0o755 | mode:04o}); run `chmod go-w {spoiled}`"


def test_a_folder_like_tmp_is_no_way_for_others(package: Path) -> None:
    package.parent.chmod(0o1777)
    assert problem_of([package], OWN) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", ["__init__.py", "inner", ".."])
def test_a_place_of_another_user_is_named(package: Path, place: str) -> None:
    spoiled = (package / place).resolve()
    os.chown(spoiled, 12345, 0)
    assert problem_of([package], OWN) == f"{spoiled} belongs to uid 12345; run `chown root {spoiled}`"


def test_where_a_link_leads_counts(package: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o777)
    (tmp_path / "elsewhere").chmod(0o777)
    package.rename(tmp_path / "elsewhere" / "package")
    package.symlink_to(tmp_path / "elsewhere" / "package")
    assert problem_of([package], OWN).startswith(f"{tmp_path / 'elsewhere'} can be changed by others (mode 0777)")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_link_of_another_user_on_the_way_is_named(package: Path, tmp_path: Path) -> None:
    home, link = tmp_path / "home", tmp_path / "linked"
    home.mkdir()
    (home / "link").symlink_to(package)
    link.symlink_to(home / "link")
    assert problem_of([link], OWN) == ""
    os.chown(home / "link", 12345, 0, follow_symlinks=False)
    assert problem_of([link], OWN) == f"{home / 'link'} belongs to uid 12345; run `chown root {home / 'link'}`"
    os.chown(home, 12345, 0)
    assert problem_of([link], OWN) == f"{home} belongs to uid 12345; run `chown root {home}`"


@pytest.mark.parametrize("place", ["", "inner"])
def test_a_package_to_which_anybody_can_add_is_named_although_nobody_can_remove(package: Path, place: str) -> None:
    spoiled = package / place
    spoiled.chmod(0o1777)
    problem = problem_of([package], OWN)
    assert problem == f"{spoiled} can be changed by others (mode 1777); run `chmod go-w {spoiled}`"


@pytest.mark.parametrize("target", ["elsewhere", "../../elsewhere"])
def test_what_lies_in_a_linked_folder_counts(package: Path, tmp_path: Path, target: str) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir(mode=0o755)
    (folder / "source.py").write_text("")
    (folder / "source.py").chmod(0o666)
    (package / "linked").symlink_to(target if target.startswith(".") else tmp_path / target)
    assert problem_of([package], OWN).startswith(f"{folder / 'source.py'} can be changed by others (mode 0666)")


def test_links_in_a_circle_end(package: Path) -> None:
    (package / "inner" / "above").symlink_to("..")
    assert problem_of([package], OWN) == ""
    (package / "loop").symlink_to("loop")
    assert problem_of([package], OWN) == f"{package / 'loop'} cannot be examined: Too many levels of symbolic links"


def test_a_package_without_end_is_not_read_to_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinetod.plugins.file_trust.MAX_FILES", 3)
    assert problem_of([package], OWN) == f"{package} has more than 3 files"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert problem_of([tmp_path / "none"], OWN) == f"{tmp_path / 'none'} cannot be examined: No such file or directory"
