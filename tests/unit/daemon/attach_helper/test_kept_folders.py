"""How many folders the attach helper keeps, for how long, and what it does about those that do not answer."""

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from kinetod.attach_helper import kept_folders as module
from kinetod.attach_helper import messages
from kinetod.attach_helper.allow_list import ProcessOwner
from kinetod.attach_helper.attach_pool import AttachHelpers
from kinetod.attach_helper.kept_folders import KeptFolders
from kinetod.attach_helper.messages import Denial
from kinetod.processes import credentials
from kinetod.processes.identity import BOOT_TIME_NS, ProcessKey, start_time_ns
from support.service import scripted_helper
from support.waiting import scaled, soon

T = TypeVar("T")
OWN = ProcessKey(os.getpid(), start_time_ns(os.getpid()))
FOUND = credentials.read(os.getpid())
OWNER = ProcessOwner(FOUND.uids, container=False)
FAR_S = (1 << 32) - 1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that is late is not one that hangs; the test of one that does has its own deadlines."""
    monkeypatch.setattr(module, "ASK_S", scaled(20))
    monkeypatch.setattr(module, "WARM_UP_S", scaled(20))


def asked(until_s: int = FAR_S, *, only_try: bool = False) -> messages.MakeFolder:
    return messages.MakeFolder(
        target=messages.Target(OWN.pid, OWN.start_time_ns),
        approved=msgspec.convert(FOUND.to_dict(), messages.Approved),
        administrator=False,
        boot_time_ns=BOOT_TIME_NS,
        file="kinetod-c1-00_7.json",
        until_s=until_s,
        only_try=only_try,
    )


def with_folders(
    use: Callable[[KeptFolders], Awaitable[T]], *, script: str = "", alive: bool = True, **options: Any
) -> T:
    async def run() -> T:
        helpers = AttachHelpers(1, command=scripted_helper.command(script)) if script else AttachHelpers(1)
        folders = KeptFolders(helpers, lambda _folder: alive, reap_period_s=0.05, **options)
        try:
            return await use(folders)
        finally:
            await folders.stop()
            await helpers.stop()

    return asyncio.run(run())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def made(folders: KeptFolders, until_s: int = FAR_S) -> Path:
    return Path((await folders.make(asked(until_s), FOUND, OWNER)).path)


async def denied(folders: KeptFolders, *, only_try: bool = False) -> str:
    with pytest.raises(Denial) as caught:
        await folders.make(asked(only_try=only_try), FOUND, OWNER)
    return str(caught.value)


def test_a_folder_is_kept_with_one_descriptor_until_it_is_removed() -> None:
    async def use(folders: KeptFolders) -> None:
        await folders.make(asked(only_try=True), FOUND, OWNER)
        assert folders.count == 0
        gc.collect()  # what other tests have left
        before = descriptors()
        path = await made(folders)
        assert path.is_dir()
        assert (folders.count, descriptors()) == (1, before + 1)
        folder = folders.get(OWN, path.name)
        assert folder is not None
        assert folders.get(ProcessKey(OWN.pid, OWN.start_time_ns + 1), path.name) is None
        assert await folders.look(folder) == messages.FolderSeen(writing_bytes=None, whole=False)
        await folders.remove(folder)
        assert not path.exists()
        assert (folders.count, descriptors()) == (0, before)
        with pytest.raises(Denial, match="has been removed"):
            await folders.look(folder)

    with_folders(use)


def test_a_user_has_so_many_and_all_have_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(folders: KeptFolders) -> None:
        first = await made(folders)
        monkeypatch.setattr(module, "MAX_PER_USER", 1)
        assert "wait until other captures have ended" in await denied(folders)
        monkeypatch.setattr(module, "MAX_PER_USER", 10)
        monkeypatch.setattr(module, "MAX_FOLDERS", 1)
        assert "wait until other captures have ended" in await denied(folders)
        folder = folders.get(OWN, first.name)
        assert folder is not None
        await folders.remove(folder)
        second = folders.get(OWN, (await made(folders)).name)
        assert second is not None
        await folders.remove(second)

    with_folders(use)


def test_a_folder_whose_time_is_over_is_removed() -> None:
    async def use(folders: KeptFolders) -> None:
        path = await made(folders, int(time.time()) - 1)
        await soon(lambda: not path.exists(), "it is removed")
        assert folders.count == 0

    with_folders(use)


def test_the_folder_of_a_process_that_has_ended_is_removed_once_nobody_asks_for_it() -> None:
    async def use(folders: KeptFolders) -> None:
        path = await made(folders)
        (path / "kinetod-c1-00_7.json").touch()
        await soon(lambda: not path.exists(), "it is removed")

    with_folders(use, alive=False, fetch_s=0.0)


def test_when_the_service_stops_it_leaves_the_folders_of_processes_that_live() -> None:
    living = with_folders(made)
    assert living.is_dir()
    living.rmdir()
    assert not with_folders(made, alive=False).exists()


def test_a_folder_that_does_not_answer_is_not_asked_again_and_its_user_waits_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.3)
    monkeypatch.setattr(module, "WARM_UP_S", 0.3)
    now = [1000.0]

    async def use(folders: KeptFolders) -> None:
        assert "did not respond" in await denied(folders, only_try=True)
        assert "are not used for 60 s" in await denied(folders, only_try=True)
        now[0] += 61
        assert "are left alone" not in await denied(folders, only_try=True)
        assert "are not used for 120 s" in await denied(folders, only_try=True)

    with_folders(use, script="hang", monotonic=lambda: now[0])


def test_a_helper_process_that_crashes_costs_one_answer() -> None:
    async def use(folders: KeptFolders) -> None:
        assert "could not be used" in await denied(folders)
        assert folders.count == 0

    with_folders(use, script="crash")
