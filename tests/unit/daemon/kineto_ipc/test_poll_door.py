import array
import asyncio
import contextlib
import gc
import os
import socket
import stat
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kinetod.base import metrics
from kinetod.kineto_ipc import poll_door
from kinetod.kineto_ipc.door_findings import ABSTRACT
from kinetod.kineto_ipc.poll_door import PollDoor
from kinetod.kineto_ipc.poll_sockets import AbstractSocket, bound_socket
from kinetod.kineto_ipc.poller_registry import OfferEvent
from support.peers import libkineto
from support.peers.libkineto import BUSY, Libkineto
from support.service.calls_as import plain_python
from support.waiting import soon


@pytest.fixture(autouse=True)
def no_poll_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the thread that answers has not run."""
    monkeypatch.setattr(poll_door, "LATE_NS", 10**12)


@pytest.fixture
def name() -> bytes:
    """Abstract names are shared by the whole machine."""
    return f"\0dynolog{uuid.uuid4()}\0".encode()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def folder(short_path: Path) -> Path:
    made = short_path / "ipc"
    made.mkdir()
    made.chmod(0o1777)
    return made


def with_door(
    test: Callable[[PollDoor], Awaitable[Any]], name: bytes, folders: Sequence[Path] = (), *, retry_s: float = 30
) -> None:
    async def run() -> None:
        door = PollDoor(folders, name=name, retry_s=retry_s)
        await door.start()
        try:
            await test(door)
        finally:
            await door.stop()

    asyncio.run(run())


def dropped(reason: str) -> float:
    return metrics.REGISTRY.get_sample_value("kineto_polls_dropped_total", {"reason": reason}) or 0.0


def test_polls_are_answered_at_the_abstract_name(name: bytes) -> None:
    async def test(door: PollDoor) -> None:
        client = Libkineto(daemon=name, job=77)
        assert await asyncio.to_thread(client.poll) == ""
        (found,) = await soon(door.processes.all, "the process is known")
        assert (found.key.pid, found.pids, found.job_id) == (os.getpid(), (os.getpid(), os.getppid()), 77)
        client.close()

    with_door(test, name)


def test_an_offer_goes_to_the_process_and_its_fate_comes_back(name: bytes) -> None:
    async def test(door: PollDoor) -> None:
        client = Libkineto(daemon=name)
        await asyncio.to_thread(client.poll)
        events: asyncio.Queue[OfferEvent] = asyncio.Queue()
        (found,) = await soon(door.processes.all, "the process is known")
        found.offer(b"A=1\n", events.put_nowait)
        assert [await asyncio.to_thread(client.poll, wants) for wants in (3, BUSY, 3)] == ["A=1\n", "", ""]
        assert [await events.get() for _ in range(3)] == [OfferEvent.SENT, OfferEvent.TAKEN, OfferEvent.OVER]
        client.close()

    with_door(test, name)


def test_a_poll_that_is_read_late_gets_no_answer_which_would_be_read_as_the_next_one(
    name: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_door, "LATE_NS", -1)
    before = dropped("late")

    async def test(door: PollDoor) -> None:
        client = Libkineto(daemon=name)
        client.send(libkineto.poll())
        (found,) = await soon(door.processes.all, "the process is known")
        found.offer(b"A=1\n", lambda _event: None)
        client.send(libkineto.poll())
        await soon(lambda: dropped("late") == before + 2, "both are dropped")
        monkeypatch.setattr(poll_door, "LATE_NS", 10**12)
        assert await asyncio.to_thread(client.poll) == "A=1\n"
        client.close()

    with_door(test, name)


def test_the_kernel_says_when_a_poll_was_sent(name: bytes) -> None:
    with bound_socket(name) as daemon, contextlib.closing(Libkineto(daemon=name)) as client:
        before_ns = time.time_ns()
        client.send(libkineto.poll())
        after_ns = time.time_ns()
        datagram = AbstractSocket(daemon).receive()
    assert datagram is not None
    assert before_ns <= datagram.sent_ns <= after_ns
    assert 0 <= datagram.age_ns() < 60 * 10**9


def test_registrations_are_answered(name: bytes) -> None:
    async def test(_door: PollDoor) -> None:
        client = Libkineto(daemon=name)
        client.send(libkineto.registration(0, 7, 77))
        answer = await asyncio.to_thread(client.receive)
        assert answer == b"\4" + bytes(7) + b"ctxt".ljust(32, b"\0") + b"\1\0\0\0"
        client.close()

    with_door(test, name)


def test_polls_are_answered_in_a_folder_whose_socket_everybody_may_write_to(name: bytes, folder: Path) -> None:
    async def test(_door: PollDoor) -> None:
        assert stat.S_IMODE((folder / "dynolog").stat().st_mode) == 0o666
        client = Libkineto(folder)
        assert await asyncio.to_thread(client.poll) == ""
        assert client.sender == str(folder / "dynolog")
        client.close()

    with_door(test, name, [folder])
    assert list(folder.iterdir()) == []


def test_a_socket_that_a_dead_daemon_has_left_is_replaced(name: bytes, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(folder / "dynolog"))

    async def test(door: PollDoor) -> None:
        assert door.state().problems == {}

    with_door(test, name, [folder])


def test_the_socket_of_a_running_daemon_is_left_alone(name: bytes, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(folder / "dynolog"))

        async def test(door: PollDoor) -> None:
            me = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"
            problem = f"{me} is using it; stop that process, or set dynolog.ipc = false"
            assert door.state().problems == {str(folder): problem}

        with_door(test, name, [folder])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.connect(str(folder / "dynolog"))


def test_once_the_other_daemon_has_stopped_polls_are_answered(name: bytes) -> None:
    other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    other.bind(name)

    async def test(door: PollDoor) -> None:
        assert list(door.state().problems) == [ABSTRACT]
        other.close()
        await soon(lambda: not door.state().problems, "the name is free")
        client = Libkineto(daemon=name)
        assert await asyncio.to_thread(client.poll) == ""
        client.close()

    with_door(test, name, retry_s=0.05)


def test_a_socket_that_somebody_has_removed_is_made_again(name: bytes, folder: Path) -> None:
    async def test(_door: PollDoor) -> None:
        (folder / "dynolog").unlink()
        await soon((folder / "dynolog").exists, "the socket is there again")
        client = Libkineto(folder)
        assert await asyncio.to_thread(client.poll) == ""
        client.close()

    with_door(test, name, [folder], retry_s=0.05)


def test_a_socket_that_somebody_else_has_put_there_meanwhile_is_not_removed_at_the_end(
    name: bytes, folder: Path
) -> None:
    async def test(_door: PollDoor) -> None:
        (folder / "dynolog").unlink()
        (folder / "dynolog").write_text("another's")

    with_door(test, name, [folder])
    assert (folder / "dynolog").read_text() == "another's"


def problem_with(folder: Path, name: bytes) -> str:
    problems = []

    async def test(door: PollDoor) -> None:
        problems.append(door.state().problems[str(folder)])

    with_door(test, name, [folder])
    return problems[0]


def test_folders_in_which_others_could_replace_the_socket_are_refused(name: bytes, folder: Path) -> None:
    folder.chmod(0o777)
    assert problem_with(folder, name) == (
        f"users other than the owner of {folder} can replace the socket in it; set the sticky bit: chmod +t {folder}"
    )


def test_a_folder_that_is_not_there_is_a_problem_and_no_end(name: bytes, short_path: Path) -> None:
    assert problem_with(short_path / "no", name) == (
        f"{short_path}/no: No such file or directory; create it, or remove it from dynolog.socket_dirs"
    )


def test_a_folder_whose_path_leaves_no_room_for_clients_names_is_refused(name: bytes, short_path: Path) -> None:
    long = short_path / ("x" * 60)
    long.mkdir()
    assert problem_with(long, name) == (
        f"{long}: a path of {len(str(long))} characters leaves no room for the names of libkineto's sockets; use one "
        "of at most 54 characters"
    )


def test_what_is_not_a_socket_is_not_replaced(name: bytes, folder: Path) -> None:
    (folder / "dynolog").symlink_to("/dev/log")
    assert problem_with(folder, name).startswith(f"{folder}/dynolog exists but is not a socket")
    assert (folder / "dynolog").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to somebody else")
def test_folders_of_other_users_are_refused(name: bytes, folder: Path) -> None:
    os.chown(folder, 1234, 1234)
    assert "belongs to uid 1234" in problem_with(folder, name)


def test_a_link_of_a_trusted_user_may_lead_to_the_folder(name: bytes, folder: Path, short_path: Path) -> None:
    link = short_path / "link"
    link.symlink_to(folder)

    async def test(door: PollDoor) -> None:
        assert door.state().problems == {}
        client = Libkineto(link)
        assert await asyncio.to_thread(client.poll) == ""
        client.close()

    with_door(test, name, [link])


async def is_dropped(door: PollDoor, reason: str, send: Callable[[], object]) -> bool:
    """Whether a datagram is dropped for this reason, and makes its sender no process that polls."""
    before = dropped(reason)
    await asyncio.to_thread(send)
    await soon(lambda: dropped(reason) == before + 1, "the datagram is dropped")
    return door.processes.all() == []


def test_what_is_not_libkinetos_is_dropped(name: bytes) -> None:
    async def test(door: PollDoor) -> None:
        client = Libkineto(daemon=name)
        for datagram in (b"", bytes(4096), bytes(5000), libkineto.poll(count=-1)):
            assert await is_dropped(door, "malformed", lambda datagram=datagram: client.send(datagram))  # type: ignore[misc]
        client.close()

    with_door(test, name)


def test_who_has_no_address_is_dropped(name: bytes) -> None:
    async def test(door: PollDoor) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unnamed:
            assert await is_dropped(door, "unnamed", lambda: unnamed.sendto(libkineto.poll(), name))

    with_door(test, name)


@pytest.mark.parametrize("where", ["other/dynoconfigclientx", "ipc/log", "ipc/../ipc/dynoconfigclientx"])
def test_no_answer_goes_to_a_path_that_is_no_clients(name: bytes, folder: Path, short_path: Path, where: str) -> None:
    (short_path / "other").mkdir()

    async def test(door: PollDoor) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.bind(f"{short_path}/{where}")
            assert await is_dropped(door, "unnamed", lambda: client.sendto(libkineto.poll(), str(folder / "dynolog")))

    with_door(test, name, [folder])


def test_an_abstract_client_of_a_folder_gets_no_answer_and_neither_does_the_opposite(name: bytes, folder: Path) -> None:
    """Names would be looked up in the daemon's namespaces instead of the sender's."""

    async def test(door: PollDoor) -> None:
        abstract, filed = Libkineto(daemon=name), Libkineto(folder)
        assert await is_dropped(
            door, "unnamed", lambda: abstract.sock.sendto(libkineto.poll(), str(folder / "dynolog"))
        )
        assert await is_dropped(door, "unnamed", lambda: filed.sock.sendto(libkineto.poll(), name))
        abstract.close()
        filed.close()

    with_door(test, name, [folder])


def test_a_link_to_somebody_elses_socket_gets_no_answer(name: bytes, folder: Path, short_path: Path) -> None:
    victim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    victim.bind(str(short_path / "victim"))

    async def test(_door: PollDoor) -> None:
        client = Libkineto(folder)
        Path(str(client.address)).unlink()
        Path(str(client.address)).symlink_to(short_path / "victim")
        before = dropped("unread")
        client.send(libkineto.poll())
        await soon(lambda: dropped("unread") == before + 1, "the datagram is dropped")
        with pytest.raises(BlockingIOError):
            victim.recv(100)
        client.close()

    with_door(test, name, [folder])
    victim.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a socket to somebody else")
def test_a_socket_of_another_user_gets_no_answer(name: bytes, folder: Path) -> None:
    async def test(_door: PollDoor) -> None:
        client = Libkineto(folder)
        os.chown(str(client.address), 1234, 1234)
        before = dropped("unread")
        client.send(libkineto.poll())
        await soon(lambda: dropped("unread") == before + 1, "the datagram is dropped")
        client.close()

    with_door(test, name, [folder])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
def test_credentials_that_do_not_fit_their_process_get_nothing_that_was_meant_for_it(name: bytes) -> None:
    """Whoever has the right to (root of a container may have it) says who sent a datagram; the kernel looks at no more
    than whether it may say so.
    """

    async def test(door: PollDoor) -> None:
        owner, forger = Libkineto(daemon=name), Libkineto(daemon=name)
        assert await asyncio.to_thread(owner.poll) == ""
        await soon(lambda: door.processes.all(), "the process is known")
        (process,) = door.processes.all()
        process.offer(b"CONFIGURATION", lambda _event: None)
        before = dropped("unidentified")
        for pid, uid in ((os.getpid(), 61001), (other.pid, 0), (other.pid, 61002)):
            said = struct.pack("iII", pid, uid, uid)
            credentials = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, said)]
            forger.sock.sendmsg([libkineto.poll(pids=[pid])], credentials, 0, name)
        await soon(lambda: dropped("unidentified") == before + 3, "the datagrams are dropped")
        assert [each.key.pid for each in door.processes.all()] == [os.getpid()]
        assert await asyncio.to_thread(owner.poll) == "CONFIGURATION"
        assert b"CONFIGURATION" not in (forger.receive(0.01) or b"")
        owner.close()
        forger.close()

    with subprocess.Popen(["/bin/sleep", "1000"], user=61001, group=61001, extra_groups=[]) as other:
        try:
            with_door(test, name)
        finally:
            other.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
def test_the_kernel_lets_nobody_else_claim_another_process(name: bytes) -> None:
    script = (
        "import os, socket, struct; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "for said in ((os.getppid(), 61001, 61001), (os.getpid(), 0, 0)):\n"
        "    try: s.sendmsg([b'x'], [(1, socket.SCM_CREDENTIALS, struct.pack('iII', *said))], 0, bytes.fromhex(%r))\n"
        "    except PermissionError: print('refused')\n"
    )

    async def test(_door: PollDoor) -> None:
        words = [*plain_python(61001), "-c", script % name.hex()]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=True)
        assert done.stdout == "refused\nrefused\n"

    with_door(test, name)


def test_descriptors_that_come_with_a_datagram_are_not_taken(name: bytes) -> None:
    async def test(door: PollDoor) -> None:
        client = Libkineto(daemon=name)
        gc.collect()  # what other tests have left
        before = len(list(Path("/proc/self/fd").iterdir()))
        ends = os.pipe()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ends[1]] * 20))]
        try:
            client.sock.sendmsg([libkineto.poll(pids=[1])], rights, 0, name)
        except PermissionError:  # from Linux 6.16 on
            client.sock.sendto(libkineto.poll(pids=[1]), name)
        assert await asyncio.to_thread(client.receive) is not None
        for end in ends:
            os.close(end)
        await soon(lambda: door.processes.all(), "the process is known")
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 1  # the pidfd
        client.close()

    with_door(test, name)


def test_stopping_closes_everything(name: bytes, folder: Path) -> None:
    descriptors = Path("/proc/self/fd")
    gc.collect()  # what other tests have left
    before = len(list(descriptors.iterdir()))

    async def test(_door: PollDoor) -> None:
        client = Libkineto(daemon=name)
        await asyncio.to_thread(client.poll)
        client.close()

    with_door(test, name, [folder])
    assert len(list(descriptors.iterdir())) == before
