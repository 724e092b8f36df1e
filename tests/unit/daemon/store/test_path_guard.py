"""Links, FIFOs and other people's folders where the store should be."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.spool.raw_records import RawWriter
from kinetod.base.errors import StartError
from kinetod.captures.result.fetch import check_local
from kinetod.store import path_guard
from kinetod.store.capture_store import Store
from kinetod.store.path_guard import check_store, open_regular
from kinetod.uploads.upload_job import LocalFile
from kinetod.uploads.worker_protocol import LocalDamage

OTHER = 61001
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user: needs root")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    Store(tmp_path / "state").close()
    return tmp_path / "state"


def test_a_store_of_our_own_is_taken(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = sorted(path.name for path in state.iterdir())
    check_store(state)
    assert sorted(path.name for path in state.iterdir()) == before
    assert caplog.messages == []


@needs_root
@pytest.mark.parametrize("name", [".", "captures", "trash", "index.sqlite"])
def test_what_belongs_to_another_user_is_refused(state: Path, name: str) -> None:
    os.chown(state / name, OTHER, OTHER)
    with pytest.raises(StartError, match=f"not safe: .*{name if name != '.' else 'state'} belongs to uid {OTHER}"):
        check_store(state)


@needs_root
def test_another_users_link_is_refused_wherever_it_leads(state: Path, tmp_path: Path) -> None:
    (state / "trash").rename(tmp_path / "elsewhere")
    (state / "trash").symlink_to(tmp_path / "elsewhere")
    check_store(state)
    os.lchown(state / "trash", OTHER, OTHER)
    with pytest.raises(StartError, match=f"trash belongs to uid {OTHER}"):
        check_store(state)


@needs_root
def test_a_folder_of_another_user_around_it_is_refused_to_root(state: Path, tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER, OTHER)
    with pytest.raises(StartError, match=f"is in .*, which belongs to uid {OTHER}"):
        check_store(state)


@needs_root
def test_a_folder_around_it_that_everybody_may_change_is_refused_to_root(state: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StartError, match="where any user can rename it"):
        check_store(state)
    tmp_path.chmod(0o1777)
    check_store(state)


@needs_root
def test_a_users_own_daemon_does_not_judge_the_folders_around(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StartError):
        check_store(state)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    check_store(state)


@pytest.mark.parametrize(
    ("uid", "users", "is_root"),
    [(0, "0 0 4294967295", True), (0, "0 100000 65536", False), (OTHER, "0 0 4294967295", False)],
)
def test_root_of_a_user_namespace_is_not_root_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, users: str, is_root: bool
) -> None:
    (tmp_path / "uid_map").write_text(f"{users}\n")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert path_guard._is_root_of_host(tmp_path / "uid_map") is is_root


def test_rights_of_others_that_cannot_be_taken_away_are_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.chmod(0o775)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(StartError, match=r"state is writable by other users \(mode 0775\)"):
        check_store(state)


def test_rights_of_others_to_write_are_taken_away(state: Path) -> None:
    state.chmod(0o777)
    (state / "captures").chmod(0o775)
    check_store(state)
    assert (state.stat().st_mode & 0o777, (state / "captures").stat().st_mode & 0o777) == (0o755, 0o755)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: path.symlink_to("/nowhere"), "is a dangling link"),
        (lambda path: path.symlink_to("/dev/null"), "is not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be examined: Too many levels"),
    ],
    ids=["fifo", "folder", "dangling link", "device", "circle of links"],
)
def test_an_index_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None], problem: str) -> None:
    make(tmp_path / "index.sqlite")
    with pytest.raises(StartError, match=problem):
        check_store(tmp_path)


@pytest.mark.parametrize("name", ["captures", "trash"])
def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(StartError, match="is not a folder"):
        check_store(tmp_path)


@pytest.fixture(params=["fifo", "link", "folder"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Something that lies where a stored file should be."""
    path = tmp_path / "trace.json.gz"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "link":
        (tmp_path / "secret").write_bytes(b"secret")
        path.symlink_to(tmp_path / "secret")
    else:
        path.mkdir()
    return path


def test_what_is_no_regular_file_is_neither_read_nor_waited_for(no_file: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match=r"not a regular file|Too many levels|Is a directory"):
        open_regular(no_file)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_it_is_damage_when_a_capture_is_verified(no_file: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    found = asyncio.run(check_local(store, no_file, pb.TraceFile(size_bytes=6)))
    store.close()
    assert "cannot be read (" in found


def test_it_is_damage_when_a_capture_is_uploaded(no_file: Path) -> None:
    with pytest.raises(LocalDamage, match="cannot be read"):
        LocalFile(no_file, "trace.json.gz")


def test_records_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "victim").write_bytes(b"as it was")
    (tmp_path / "raw" / "buffers.bin").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Too many levels"):
        RawWriter(tmp_path / "raw", source="s", format="f", metadata={})
    assert (tmp_path / "victim").read_bytes() == b"as it was"


@pytest.mark.parametrize("where", [".", "targets", "targets/7-70"])
def test_removing_a_capture_with_a_link_in_it_leaves_what_the_link_leads_to(state: Path, where: str) -> None:
    outside = state.parent / "outside"
    (outside / "targets" / "7-70").mkdir(parents=True)
    (outside / "kept").write_bytes(b"kept")
    folder = state / "captures" / "c1"
    (folder / where).parent.mkdir(parents=True, exist_ok=True)
    (folder / where).symlink_to(outside)
    store = Store(state)
    asyncio.run(store.remove("c1"))
    store.close()
    assert (outside / "kept").read_bytes() == b"kept"
    assert (outside / "targets" / "7-70").is_dir()
    assert not os.path.lexists(folder)
    assert list((state / "trash").iterdir()) == []
