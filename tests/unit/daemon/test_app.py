"""The folders of a daemon that starts."""

import contextlib
import os
import stat
from pathlib import Path
from typing import Any, cast

import pytest
from kinetod import app
from kinetod.base.errors import StartError
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config


def config(folder: Path, **changes: Any) -> Config:
    return Config(**{"listen": (), "agent_socket": folder / "agent.sock", "state_dir": folder / "state", **changes})


@pytest.mark.parametrize(("everybody", "mode"), [(True, 0o755), (False, 0o700)])
def test_folders_of_sockets_are_open_to_whom_the_daemon_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everybody: bool, mode: int
) -> None:
    state = tmp_path / "s"
    made = config(tmp_path / "run", state_dir=state, listen=(ListenAddress(path=tmp_path / "l" / "x"),))
    monkeypatch.setattr(app, "serves_everybody", lambda _config: everybody)
    app._make_folders(made)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path / "run", tmp_path / "l", state)]
    assert modes == [mode, mode, 0o700]


@pytest.mark.parametrize(("mode", "taken"), [(0o777, False), (0o1777, True), (0o775, True)])
def test_a_folder_in_which_everybody_replaces_sockets_is_refused(tmp_path: Path, mode: int, taken: bool) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    refused = contextlib.nullcontext() if taken else pytest.raises(StartError, match="any user can replace")
    with cast("contextlib.AbstractContextManager[object]", refused):
        app._make_runtime_dir(folder, 0o755)
    assert stat.S_IMODE(folder.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
@pytest.mark.parametrize(("owner", "taken"), [(0, True), (4242, True), (4343, False)])
def test_a_folder_of_somebody_elses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, taken: bool
) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    os.chown(folder, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if taken:
        app._make_runtime_dir(folder, 0o755)
    else:
        with pytest.raises(StartError, match="belongs to uid 4343"):
            app._make_runtime_dir(folder, 0o755)


def test_a_store_that_another_user_could_replace_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path / "run")
    made.state_dir.parent.mkdir()
    made.state_dir.symlink_to("/nowhere")
    with pytest.raises(StartError, match="cannot create the state folder"):
        app._make_folders(made)
    made.state_dir.unlink()
    made.state_dir.mkdir(0o777)
    (made.state_dir / "captures").symlink_to("/nowhere")
    with pytest.raises(StartError, match=r"the store is not safe: .* is a dangling link"):
        app._make_folders(made)


def test_a_folder_for_sockets_is_made_with_those_around_it(tmp_path: Path) -> None:
    app._make_runtime_dir(tmp_path / "run" / "kineto", 0o755)
    assert (tmp_path / "run" / "kineto").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"cannot create the folder .*file/kineto for the sockets: Not a directory"):
        app._make_runtime_dir(tmp_path / "file" / "kineto", 0o755)
