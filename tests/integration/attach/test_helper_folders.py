"""Folders of the attach helper in processes of another user who does what he can against it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from kinetod.attach_helper import messages
from kinetod.attach_helper.helper_client import HelperService, HelperTraceFolders, target_of
from kinetod.kineto_files.interface import FileRefused, FileTooLarge, FolderUnreachable, OpenTraceFolder, Sight
from kinetod.processes.identity import BOOT_TIME_NS, ProcessKey, start_time_ns
from support.service import attach_service, subjects
from support.service.approvals import approval_of
from support.service.attach_service import (
    CALLER_UID,
    OWNER_UID,
    POLICY,
    SERVICE_UID,
    Service,
    as_caller,
    own_folders,
    unprivileged,
)
from support.waiting import scaled, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
T = TypeVar("T")
NAME = "kinetod-c1-0123456789abcdef_7.json"
MIB = 1 << 20
OTHER_UID = 64993
OWNER = tuple(unprivileged(OWNER_UID, "dac_read_search"))
WRITE = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with attach_service.running() as started:
        yield started


@pytest.fixture
def target() -> Iterator[int]:
    with subjects.python(prefix=OWNER) as pid:
        yield pid


def key_of(pid: int) -> ProcessKey:
    return ProcessKey(pid, start_time_ns(pid))


def ask(service: Service, use: Callable[[HelperTraceFolders], Awaitable[T]]) -> T:
    """As root, which may ask, too."""

    async def run() -> T:
        folders = HelperTraceFolders(HelperService(service.socket))
        try:
            return await use(folders)
        finally:
            await folders.stop()

    return asyncio.run(run())


def in_folder(service: Service, pid: int, use: Callable[[OpenTraceFolder], Awaitable[T]], within_s: int = 600) -> T:
    """Has the helper make a folder, and remove it afterwards."""
    key, approval = key_of(pid), approval_of(pid)

    async def run(folders: HelperTraceFolders) -> T:
        folder = await folders.open(key, approval, NAME, until_ns=time.time_ns() + within_s * 10**9)
        try:
            return await use(folder)
        finally:
            await folder.remove()

    return ask(service, run)


def problem(service: Service, pid: int) -> str:
    return ask(service, lambda folders: folders.problem(key_of(pid), approval_of(pid)))


async def copied(folder: OpenTraceFolder, tmp_path: Path) -> bytes:
    await folder.copy(tmp_path / "copy", max_bytes=MIB, on_bytes=lambda _size: None, deadline_s=scaled(10))
    return (tmp_path / "copy").read_bytes()


def write_as(uid: int, path: Path, text: str = "{}") -> int:
    return as_caller(uid, WRITE, str(path), text).returncode


def test_the_owner_writes_the_helper_gives_the_file_and_removes_both(
    service: Service, target: int, tmp_path: Path
) -> None:
    async def use(folder: OpenTraceFolder) -> bytes:
        path = Path(folder.path) / NAME
        assert await folder.look() == Sight(None, whole=False)
        assert write_as(OWNER_UID, path.with_name(f"{NAME}.tmp"), "{") == 0
        assert await folder.look() == Sight(1, whole=False)
        path.with_name(f"{NAME}.tmp").rename(path)
        path.chmod(0o600)  # the file's rights are the user's matter
        assert await folder.look() == Sight(None, whole=True)
        return await copied(folder, tmp_path)

    assert in_folder(service, target, use) == b"{"
    assert not own_folders()


def test_no_other_user_can_write_into_the_folder_or_list_it(service: Service, target: int) -> None:
    async def use(folder: OpenTraceFolder) -> None:
        path = Path(folder.path)
        assert write_as(OTHER_UID, path / NAME) != 0
        assert write_as(CALLER_UID, path / NAME) != 0
        for uid in (OTHER_UID, OWNER_UID):
            listed = subprocess.run([*unprivileged(uid), "ls", str(path)], capture_output=True, text=True, check=False)
            assert listed.returncode != 0 and "Permission denied" in listed.stderr
        assert write_as(OWNER_UID, path / NAME) == 0

    in_folder(service, target, use)


@pytest.mark.parametrize(
    ("trick", "why"),
    [
        ("os.symlink('/etc/shadow', path)", "is a symbolic link"),
        ("os.mkfifo(path)", "is not a regular file"),
        ("os.mkdir(path)", "is not a regular file"),
        ("open(path + '2', 'w').close(); os.link(path + '2', path)", "has 2 hard links"),
    ],
)
def test_what_is_not_the_file_of_the_processs_libkineto_is_refused_and_nothing_waits_for_it(
    service: Service, target: int, tmp_path: Path, trick: str, why: str
) -> None:
    async def use(folder: OpenTraceFolder) -> None:
        path = f"{folder.path}/{NAME}"
        assert as_caller(OWNER_UID, f"import os, sys; path = sys.argv[1]; {trick}", path).returncode == 0
        assert (await folder.look()).whole
        try:
            with pytest.raises(FileRefused, match=why):
                await copied(folder, tmp_path)
        finally:
            subprocess.run(["find", folder.path, "-mindepth", "1", "-delete"], check=True)

    in_folder(service, target, use)
    assert not own_folders()


def test_a_file_of_somebody_else_is_refused(service: Service, target: int, tmp_path: Path) -> None:
    async def use(folder: OpenTraceFolder) -> None:
        (Path(folder.path) / NAME).write_text("root's")
        with pytest.raises(FileRefused, match="belongs to uid 0"):
            await copied(folder, tmp_path)

    in_folder(service, target, use)


def test_a_sparse_file_of_a_tebibyte_is_not_read(service: Service, target: int, tmp_path: Path) -> None:
    async def use(folder: OpenTraceFolder) -> None:
        path = Path(folder.path) / NAME
        path.touch()
        os.chown(path, OWNER_UID, OWNER_UID)
        os.truncate(path, 1 << 40)
        with pytest.raises(FileTooLarge):
            await copied(folder, tmp_path)
        assert not (tmp_path / "copy").exists()

    in_folder(service, target, use)
    assert not own_folders()


def test_what_the_owner_leaves_in_the_folder_stays_and_the_helper_says_so(service: Service, target: int) -> None:
    places = []

    async def use(folder: OpenTraceFolder) -> None:
        places.append(Path(folder.path))
        assert write_as(OWNER_UID, Path(folder.path) / "litter") == 0

    with pytest.raises(OSError, match="not empty"):
        in_folder(service, target, use)
    assert [path.name for path in places[0].iterdir()] == ["litter"]
    (places[0] / "litter").unlink()
    places[0].rmdir()


@contextmanager
def program_in(where: Path, *prefix: str) -> Iterator[int]:
    """A process whose libkineto is told to write into that folder."""
    with subjects.python(prefix=("env", f"KINETO_ONDEMAND_TRACE_DIR={where}", *prefix, *OWNER)) as pid:
        yield pid


@pytest.fixture
def owners_folder() -> Iterator[Path]:
    made = Path(f"/tmp/folder-of-owner-{os.getpid()}")
    made.mkdir()
    os.chown(made, OWNER_UID, OWNER_UID)
    made.chmod(0o1777)
    try:
        yield made
    finally:
        subprocess.run(["rm", "-rf", str(made)], check=True)


def test_a_folder_that_was_replaced_by_a_link_is_not_followed(
    service: Service, owners_folder: Path, tmp_path: Path
) -> None:
    aim = owners_folder / "aim"
    aim.mkdir()
    (aim / NAME).write_text("{}")
    swap = "import os, sys; os.rename(sys.argv[1], sys.argv[1] + '2'); os.symlink(sys.argv[2], sys.argv[1])"

    async def use(folder: OpenTraceFolder) -> None:
        assert as_caller(OWNER_UID, swap, folder.path, str(aim)).returncode == 0
        assert await folder.look() == Sight(None, whole=False)
        with pytest.raises(FileRefused, match="No such file"):
            await copied(folder, tmp_path)

    with program_in(owners_folder) as pid:
        in_folder(service, pid, use)
    assert (aim / NAME).exists()


def test_a_folder_behind_a_link_is_not_entered(service: Service, owners_folder: Path) -> None:
    (owners_folder / "link").symlink_to("/tmp")
    with program_in(owners_folder / "link") as pid:
        assert "symbolic link" in problem(service, pid)


def test_a_folder_that_only_its_owner_may_write_to_is_named_with_the_remedy(
    service: Service, owners_folder: Path
) -> None:
    owners_folder.chmod(0o755)
    with program_in(owners_folder) as pid:
        said = problem(service, pid)
        assert f"is not writable by the attach helper's user (uid {SERVICE_UID})" in said
        assert "chmod 1777" in said and "--recorder agent" in said


def test_a_file_that_is_mounted_in_its_place_is_refused(service: Service, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the same user, elsewhere")
    os.chown(secret, OWNER_UID, OWNER_UID)

    async def use(folder: OpenTraceFolder) -> None:
        path = f"{folder.path}/{NAME}"
        enter = ["nsenter", "-t", str(pid), "-m"]
        subprocess.run(["sh", "-c", f": > {path}; chown {OWNER_UID} {path}"], check=True)
        subprocess.run([*enter, "mount", "--bind", str(secret), path], check=True)
        try:
            with pytest.raises(FileRefused, match="is a mount point"):
                await copied(folder, tmp_path)
        finally:
            subprocess.run([*enter, "umount", path], check=True)

    with subjects.python(prefix=("unshare", "--mount", *OWNER)) as pid:
        in_folder(service, pid, use)


def test_a_folder_of_another_process_that_is_mounted_elsewhere_is_not_taken_for_ones_own(
    service: Service, target: int
) -> None:
    false_name = "kinetod-ffffffff-0123456789abcdef"

    async def use(folder: OpenTraceFolder) -> None:
        (Path(folder.path) / NAME).write_text("{}")
        place = Path("/tmp") / false_name
        place.mkdir()
        try:
            mount = f'mount --bind {folder.path} {place} && exec "$@"'
            with subjects.python(prefix=("unshare", "--mount", "sh", "-c", mount, "sh", *OWNER)) as pid:
                key = key_of(pid)
                asked = messages.RemoveFolder(
                    target=target_of(key), boot_time_ns=BOOT_TIME_NS, name=false_name, file=NAME
                )
                said, _ = await HelperService(service.socket).ask(asked, deadline_s=scaled(10))
                assert isinstance(said, messages.RefusedReply)
                assert "is not a folder that kinetod created" in said.reason
        finally:
            place.rmdir()
        assert (Path(folder.path) / NAME).exists()

    in_folder(service, target, use)


def test_a_user_namespace_without_a_number_for_the_helper_is_named_with_the_remedy(service: Service) -> None:
    mount = "mount -t tmpfs none /tmp && echo && exec sleep 600"
    own = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount)
    with subprocess.Popen([*unprivileged(OWNER_UID), *own], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it sleeps")
        said = problem(service, process.pid)
        process.kill()
    assert f"does not map the attach helper's user (uid {SERVICE_UID})" in said
    assert "--recorder agent" in said


def test_a_container_with_its_own_temporary_folder_gets_the_folder_there(service: Service) -> None:
    mount = 'mount -t tmpfs none /tmp && exec "$@"'
    with subjects.python(prefix=("unshare", "--mount", "sh", "-c", mount, "sh", *OWNER)) as pid:

        async def use(folder: OpenTraceFolder) -> None:
            assert Path(f"/proc/{pid}/root{folder.path}").is_dir()
            assert not own_folders()

        in_folder(service, pid, use)


def test_the_folder_of_a_process_that_has_ended_is_still_emptied(service: Service, tmp_path: Path) -> None:
    with subjects.python(prefix=OWNER) as pid:

        async def use(folder: OpenTraceFolder) -> bytes:
            assert write_as(OWNER_UID, Path(folder.path) / NAME) == 0
            os.kill(pid, signal.SIGKILL)
            until(lambda: subjects.state(pid) == "Z", "it has ended")
            os.waitpid(pid, 0)
            return await copied(folder, tmp_path)

        assert in_folder(service, pid, use) == b"{}"
    assert not own_folders()


def test_another_process_with_the_same_pid_is_not_meant(service: Service, target: int) -> None:
    async def use(folder: OpenTraceFolder) -> None:
        later = ProcessKey(target, start_time_ns(target) + 1)
        asked = messages.LookIntoFolder(
            target=target_of(later), boot_time_ns=BOOT_TIME_NS, name=Path(folder.path).name, file=NAME
        )
        said, _ = await HelperService(service.socket).ask(asked, deadline_s=scaled(10))
        assert isinstance(said, messages.RefusedReply)
        assert said.code == "ATTACH_GONE"

    in_folder(service, target, use)


def test_a_process_that_has_executed_another_program_is_not_looked_at_and_its_folder_goes(service: Service) -> None:
    run = "import os, sys; os.write(1, b'1\\n'); sys.stdin.readline(); os.execvp('sleep', ['sleep', '60'])"
    command = [*OWNER, sys.executable, "-c", run]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()

        async def use(folder: OpenTraceFolder) -> None:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it executes")
            with pytest.raises(OSError, match="has changed since"):
                await folder.look()

        in_folder(service, process.pid, use)
        assert not own_folders()
        process.kill()


def test_the_policy_is_asked_for_each_look_but_not_for_the_removal(service: Service, target: int) -> None:
    async def use(folder: OpenTraceFolder) -> None:
        service.policy.write_text(f"{POLICY}denied_users = [{OWNER_UID}]\n")
        with pytest.raises(OSError, match="are left alone"):
            await folder.look()
        assert f"processes of uid {OWNER_UID} are left alone" in await asyncio.to_thread(problem, service, target)

    try:
        in_folder(service, target, use)
    finally:
        service.policy.write_text(POLICY)
    assert not own_folders()


def test_another_name_of_a_file_is_not_served(service: Service, target: int) -> None:
    async def use(folder: OpenTraceFolder) -> None:
        asked = messages.OpenTraceFile(
            target=target_of(key_of(target)),
            boot_time_ns=BOOT_TIME_NS,
            name=Path(folder.path).name,
            file=NAME.replace("c1", "c2"),
        )
        said, _ = await HelperService(service.socket).ask(asked, deadline_s=scaled(10))
        assert isinstance(said, messages.RefusedReply)
        assert "was created for a file other than" in said.reason

    in_folder(service, target, use)


def test_a_service_that_was_started_anew_finds_the_folder_again(service: Service, target: int, tmp_path: Path) -> None:
    async def use(folder: OpenTraceFolder) -> bytes:
        assert write_as(OWNER_UID, Path(folder.path) / NAME) == 0
        assert service.process is not None
        service.process.kill()
        service.process.wait()
        service.start()
        return await copied(folder, tmp_path)

    assert in_folder(service, target, use) == b"{}"
    assert not own_folders()


def test_what_was_left_by_all_is_removed_when_the_next_folder_is_made(service: Service, target: int) -> None:
    key, approval = key_of(target), approval_of(target)
    until_ns = time.time_ns() + 600 * 10**9
    old = ask(service, lambda folders: folders.open(key, approval, NAME, until_ns=until_ns)).path
    assert write_as(OWNER_UID, Path(old) / NAME) == 0
    assert service.process is not None
    service.process.kill()
    service.process.wait()
    service.start()
    renamed = Path("/tmp/kinetod-00000001-0123456789abcdef")
    Path(old).rename(renamed)  # its time is over
    assert problem(service, target) == ""
    assert not own_folders()


def test_a_helper_to_which_all_is_read_only_writes_in_the_processs_own_mounts(target: int) -> None:
    strict = ("unshare", "--mount", "sh", "-c", 'mount -o remount,bind,ro / && exec "$@"', "sh")
    with attach_service.running(prefix=strict) as service:
        assert problem(service, target) == ""
        assert service.process is not None
        touch = ["nsenter", "-t", str(service.process.pid), "-m", "touch", f"/tmp/{NAME}"]
        assert b"Read-only" in subprocess.run(touch, capture_output=True, check=False).stderr


def test_a_hundred_folders_at_a_time_have_their_turns(service: Service, target: int) -> None:
    key, approval = key_of(target), approval_of(target)

    async def use(folders: HelperTraceFolders) -> list[str]:
        return await asyncio.gather(*(folders.problem(key, approval) for _ in range(100)))

    assert ask(service, use) == [""] * 100
    assert not own_folders()


def test_a_folder_that_cannot_be_reached_is_said(target: int, tmp_path: Path) -> None:
    key, approval = key_of(target), approval_of(target)
    missing = HelperTraceFolders(HelperService(tmp_path / "missing", start_grace_s=1))
    with pytest.raises(FolderUnreachable, match="the attach helper cannot be reached"):
        asyncio.run(missing.open(key, approval, NAME, until_ns=0))
