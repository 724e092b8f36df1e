"""The socket of an attach helper that no service manager starts."""

import os
import stat
from pathlib import Path

import pytest
from kinetod.base.errors import StartError
from kinetod.supervise.helper_service import own_socket


@pytest.mark.parametrize(("for_group", "mode"), [(False, 0o600), (True, 0o660)])
def test_it_is_open_to_its_user_and_to_its_group_only_if_so_said(tmp_path: Path, for_group: bool, mode: int) -> None:
    with own_socket(tmp_path / "attach.sock", for_group=for_group):
        found = (tmp_path / "attach.sock").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, os.geteuid(), os.getegid())


def test_one_that_was_left_behind_is_made_anew(tmp_path: Path) -> None:
    own_socket(tmp_path / "attach.sock").close()
    with own_socket(tmp_path / "attach.sock", for_group=True):
        assert stat.S_IMODE((tmp_path / "attach.sock").stat().st_mode) == 0o660


def test_another_file_in_its_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "attach.sock").write_text("mine")
    with pytest.raises(StartError, match=r"cannot listen on .*attach\.sock: Address already in use"):
        own_socket(tmp_path / "attach.sock")
    assert (tmp_path / "attach.sock").read_text() == "mine"
