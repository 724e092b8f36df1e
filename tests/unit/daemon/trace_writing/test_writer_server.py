"""The writer service with a child that fails, hangs or is not killed, and what it takes of whom."""

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

import pytest
from kinetod.base.policy_file import PolicyError, PolicyUsers, Uids
from kinetod.trace_writing import writer_client, writer_messages, writer_server
from kinetod.trace_writing import writer_messages as messages
from kinetod.trace_writing.writer_messages import PlaceTraces
from kinetod.trace_writing.writer_server import HANG_S, REQUESTS_PER_SECOND, WriterPolicy, WriterService
from support.waiting import scaled

OTHER = 61001
OK = ("/bin/echo", '[""]')
IGNORES_ITS_TIMER = (sys.executable, "-S", "-c", "import time; time.sleep(1000)")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def policy(root: Path) -> WriterPolicy:
    users = PolicyUsers(Uids(ranges=((os.getuid(),) * 2,)), Uids(ranges=((1000, 64000),)), Uids(), own_uid=990)
    return WriterPolicy(users, (root,), 1 << 20)


@contextlib.asynccontextmanager
async def connected(service: WriterService) -> AsyncIterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    service.connections.accepted(theirs)
    with ours:
        yield ours


async def said(
    service: WriterService, asked: PlaceTraces | bytes, fds: Sequence[int] = (), sock: socket.socket | None = None
) -> list[str]:
    async with contextlib.AsyncExitStack() as stack:
        end = await stack.enter_async_context(connected(service)) if sock is None else sock
        packet = asked if isinstance(asked, bytes) else messages.encode(asked)
        socket.send_fds(end, [packet], list(fds))
        answer = await asyncio.get_running_loop().sock_recv(end, messages.MAX_PACKET_BYTES)
        return list(messages.answer(answer).problems)


def play(service: WriterService, work: Callable[[], Awaitable[object]]) -> None:
    async def played() -> None:
        try:
            await work()
        finally:
            await service.stop()

    asyncio.run(played())


def test_descriptors_and_names_must_agree_and_none_stays_open(tmp_path: Path) -> None:
    service = WriterService(lambda: policy(tmp_path), command=OK)
    (tmp_path / "t").touch()

    async def work() -> None:
        with (tmp_path / "t").open() as file:
            before = len(list(Path("/proc/self/fd").iterdir()))
            for names, fds, why in (
                (("a",), [], "1 file was announced, but 0 descriptors were received"),
                ((), [file.fileno()], "0 files were announced, but 1 descriptor was received"),
                (("a",), [file.fileno()] * 3, "1 file was announced, but 3 descriptors were received"),
                (("a/b",), [file.fileno()], "'a/b' is not a file name"),
                (("a",), [file.fileno()], ""),
            ):
                found = await said(service, PlaceTraces(uid=OTHER, folder=str(tmp_path), names=names), fds)
                assert found == [why]
            found = await said(service, PlaceTraces(uid=None, folder=str(tmp_path), names=("a",)), [file.fileno()])
            assert found == ["files cannot be written without a user"]
            await asyncio.sleep(0)
            assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1  # the last connection is being closed

    play(service, work)


def test_a_policy_that_cannot_be_read_serves_nobody_and_ends_the_connection(tmp_path: Path) -> None:
    def broken() -> WriterPolicy:
        raise PolicyError("writer.toml: line 3")

    service = WriterService(broken, command=OK)

    async def work() -> None:
        async with connected(service) as sock:
            found = await said(service, PlaceTraces(uid=OTHER, folder=str(tmp_path)), sock=sock)
            assert found == ["the writer service serves no caller: writer.toml: line 3"]
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""

    play(service, work)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/bin/false",), "the writing process failed: exit status 1"),
        (("/bin/sh", "-c", "kill -9 $$"), "the writing process failed: exit status -9"),
        (("/bin/echo", "[1]"), "the writing process failed: exit status 0"),
        (("/bin/echo", '["", ""]'), "the writing process failed: exit status 0"),
        (("/nonexistent",), "the writing process failed: [Errno 2]"),
    ],
)
def test_a_child_that_dies_or_lies_is_a_reason(tmp_path: Path, command: tuple[str, ...], why: str) -> None:
    service = WriterService(lambda: policy(tmp_path), command=command)

    async def work() -> None:
        (found,) = await said(service, PlaceTraces(uid=OTHER, folder=str(tmp_path)))
        assert found.startswith(why), found

    play(service, work)


def test_who_hung_is_refused_for_a_while_and_others_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_messages, "GRACE_S", 0.0)
    clock = Clock()
    service = WriterService(lambda: policy(tmp_path), command=IGNORES_ITS_TIMER, check_s=0.2, clock=clock)
    asked = PlaceTraces(uid=OTHER, folder=str(tmp_path))

    async def work() -> None:
        assert await said(service, asked) == ["the folder did not respond within 0.2 s"]
        service._command, service._check_s = OK, scaled(20)
        (again,) = await said(service, asked)
        assert again.startswith("the folder did not respond within 0.2 s a moment ago")
        assert await said(service, PlaceTraces(uid=OTHER + 1, folder=str(tmp_path))) == [""]
        clock.now += HANG_S + 1
        assert await said(service, asked) == [""]

    play(service, work)


def test_who_gets_no_turn_is_told_before_the_front_end_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_server, "TURN_S", 0.2)
    service = WriterService(lambda: policy(tmp_path), command=("/bin/sleep", "1000"))
    asked = PlaceTraces(uid=OTHER, folder=str(tmp_path))

    async def work() -> None:
        busy = [asyncio.create_task(said(service, asked)) for _ in range(writer_server.TURNS)]
        while sum(each.used for each in service._turns.values()) < writer_server.TURNS:
            await asyncio.sleep(0)
        why = f"too many traces are being written below {tmp_path}; try again in a moment"
        assert await said(service, asked) == [why]
        for each in busy:
            each.cancel()
        await asyncio.gather(*busy, return_exceptions=True)

    play(service, work)


def test_the_front_end_waits_for_longer_than_the_service_takes() -> None:
    taken = writer_server.TURN_S + writer_messages.GRACE_S
    assert taken + writer_messages.CHECK_S < writer_messages.CHECK_S + writer_client.START_GRACE_S
    assert taken + writer_messages.WRITE_S < writer_messages.WRITE_S + writer_client.START_GRACE_S


def test_as_long_as_a_process_cannot_be_ended_its_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_messages, "GRACE_S", 0.0)
    clock = Clock()
    holding = tmp_path / "pid"
    # A process that the service does not know of keeps the pipe, as one does that the kernel does not release.
    script = f"/bin/sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > {holding}; exec /bin/sleep 1000"
    command = ("/bin/sh", "-c", script)
    service = WriterService(lambda: policy(tmp_path), command=command, check_s=scaled(1), clock=clock)
    asked = PlaceTraces(uid=OTHER, folder=str(tmp_path))

    async def work() -> None:
        await said(service, asked)
        service._command, service._check_s = OK, scaled(20)
        clock.now += HANG_S + 1
        assert "a moment ago" in (await said(service, asked))[0]
        pid = int(holding.read_text())
        ended = os.pidfd_open(pid)
        os.kill(pid, 9)
        await _readable(ended)
        os.close(ended)
        assert await said(service, asked) == [""]

    play(service, work)


def test_a_user_who_stops_several_writing_processes_is_refused_until_the_last_has_ended(tmp_path: Path) -> None:
    clock, numbers = Clock(), tmp_path / "pids"
    # Its own user may stop it, so that it keeps no deadline; the service may have no right to end another user's.
    script = f"/bin/sleep 1000 </dev/null >/dev/null 2>&1 & echo $! >> {numbers}; kill -ALRM $$"
    service = WriterService(lambda: policy(tmp_path), command=("/bin/sh", "-c", script), clock=clock)
    asked = PlaceTraces(uid=OTHER, folder=str(tmp_path))

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(writer_server.TURNS):
                group.create_task(said(service, asked))
        pids = [int(line) for line in numbers.read_text().split()]
        assert len(pids) == writer_server.TURNS == 2
        service._command = OK
        for pid in reversed(pids):
            clock.now += HANG_S + 1
            assert "a moment ago" in (await said(service, asked))[0]
            ended = os.pidfd_open(pid)
            os.kill(pid, 9)
            await _readable(ended)
            os.close(ended)
        assert await said(service, asked) == [""]

    play(service, work)


async def _readable(descriptor: int) -> None:
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ready.set)
    await ready.wait()
    asyncio.get_running_loop().remove_reader(descriptor)


def test_a_user_who_asks_too_often_waits_and_another_does_not(tmp_path: Path) -> None:
    service = WriterService(lambda: policy(tmp_path), command=OK, clock=Clock())

    async def work() -> None:
        burst = 4 * REQUESTS_PER_SECOND
        async with connected(service) as sock:
            found = [
                await said(service, PlaceTraces(uid=OTHER, folder=str(tmp_path)), sock=sock) for _ in range(burst + 1)
            ]
            assert found == [[""]] * burst + [["more than 10 requests per second; try again in a moment"]]
            assert await said(service, PlaceTraces(uid=OTHER + 1, folder=str(tmp_path)), sock=sock) == [""]

    play(service, work)


def test_it_is_idle_when_nobody_is_connected(tmp_path: Path) -> None:
    service = WriterService(lambda: policy(tmp_path), command=OK)

    async def work() -> None:
        async with connected(service) as sock:
            await said(service, PlaceTraces(uid=OTHER, folder=str(tmp_path)), sock=sock)
            assert service.connections.idle_s() == 0.0
        while service.connections.idle_s() == 0.0:
            await asyncio.sleep(0)

    play(service, work)


EXAMPLE = Path(__file__).parents[4] / "deploy/config/writer.toml"
USERS = {"kineto": 990, "ada": 1000, "root": 0}


def loaded(tmp_path: Path, text: str) -> WriterPolicy:
    path = tmp_path / "writer.toml"
    path.write_text(text)
    path.chmod(0o644)
    return writer_server.load(path, uid_of=USERS.__getitem__)


def test_by_default_nothing_is_written_anywhere(tmp_path: Path) -> None:
    found = loaded(tmp_path, "")
    assert found.refuses_caller(990) == "" == found.refuses_caller(0)
    assert "uid 1000 is not allowed to use" in found.refuses_caller(1000)
    assert found.root_of(PurePath("/tmp")) is None
    assert found.max_bytes == 4 << 30


def test_the_file_that_is_installed_says_the_defaults(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=\w+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert len(re.findall(r"^\w+ = ", text, re.MULTILINE)) == 5
    assert loaded(tmp_path, text) == loaded(tmp_path, EXAMPLE.read_text())


@pytest.mark.parametrize(
    ("users", "uid", "allowed"),
    [
        ('["1000-60000"]', 1000, True),
        ('["1000-60000"]', 999, False),
        ('["*"]', 999, True),
        ('["*"]', 0, False),
        ('["root"]', 0, True),
        ('["*"]', 990, False),
        ('["*"]', 1005, False),
    ],
)
def test_root_must_be_named_and_callers_are_never_written_as(
    tmp_path: Path, users: str, uid: int, allowed: bool
) -> None:
    found = loaded(tmp_path, f"users = {users}\ndenied_users = [1005]\n")
    assert (found.refuses_user(uid) == "") == (allowed and uid != os.geteuid())


def test_root_may_be_written_as_where_root_asks_and_is_named(tmp_path: Path) -> None:
    found = loaded(tmp_path, 'callers = ["root"]\nusers = ["root"]')
    assert replace(found, named=replace(found.named, own_uid=991)).refuses_user(0) == ""


def test_a_folder_belongs_to_a_root_by_whole_names(tmp_path: Path) -> None:
    found = loaded(tmp_path, 'roots = ["/scratch/traces"]')
    assert found.root_of(PurePath("/scratch/traces/a/b")) == found.root_of(PurePath("/scratch/traces"))
    for other in ("/scratch", "/scratch/traces2", "/scratch/traces/../x", "scratch/traces", "/"):
        assert found.root_of(PurePath(other)) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('roots = ["traces"]', "roots: must be absolute paths without"),
        ('roots = ["/a/../b"]', "roots: must be absolute paths without"),
        ('roots = ["/a\\u0000b"]', "roots: must be absolute paths without"),
        ('max_file = "much"', "max_file: expected a size"),
        ("more = 1", "more"),
        ('callers = ["*"]', "callers: must name individual users"),
        ('users = ["eve"]', "there is no user 'eve'"),
    ],
)
def test_a_mistake_refuses_everything_and_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        loaded(tmp_path, text)
