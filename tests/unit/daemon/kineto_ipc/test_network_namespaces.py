import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from kinetod.kineto_ipc import network_namespaces, poll_door
from kinetod.kineto_ipc.network_namespaces import NamespacesSeen, inhabited, open_in, own_namespace
from kinetod.kineto_ipc.poll_door import PollDoor
from kinetod.processes.identity import ProcessKey
from support.service.daemon import child_environ
from support.waiting import soon

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
LOOKS = {"KINETO_USE_DAEMON": "1"}  # the environment of a process that looks for a daemon
CLIENT = """
import sys
from support.peers.libkineto import Libkineto
print(flush=True)
for line in sys.stdin:
    print(repr(Libkineto().poll()), flush=True)
"""
HOLD = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sock.bind(b"\\0dynolog\\0")
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_poll_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the thread that answers has not run."""
    monkeypatch.setattr(poll_door, "LATE_NS", 10**12)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' daemons do not look for this test's namespaces, in which they would take the name first."""
    own = f"USE_DAEMON_{uuid.uuid4().hex}"
    monkeypatch.setattr(network_namespaces, "USE_DAEMON", own)
    monkeypatch.delitem(LOOKS, "KINETO_USE_DAEMON")
    monkeypatch.setitem(LOOKS, own, "1")


class Inside:
    """A process in a network namespace of its own."""

    def __init__(self, code: str, variables: Mapping[str, str]) -> None:
        environ = {name: value for name, value in child_environ().items() if not name.startswith("KINETO_")}
        self.process = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", code],
            env={**environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.namespace = Path(f"/proc/{self.process.pid}/ns/net").stat().st_ino

    def ask(self) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("poll\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def inside(code: str = CLIENT, **variables: str) -> Iterator[Inside]:
    made = Inside(code, variables or LOOKS)
    try:
        yield made
    finally:
        made.process.communicate()


class OnlyThis:
    """An opener of one namespace: others' tests have theirs."""

    def __init__(self, namespace: int) -> None:
        self.namespace = namespace
        self.fails = False

    async def poll_sockets(self, served: Collection[int]) -> NamespacesSeen | None:
        if self.fails:
            return None
        found = inhabited(own_namespace())
        keys = found.get(self.namespace)
        if keys is None:
            return NamespacesSeen()
        opened = {} if self.namespace in served else {self.namespace: open_in(self.namespace, keys)}
        return NamespacesSeen(frozenset([self.namespace]), opened)


@needs_root
def test_processes_that_look_for_a_daemon_are_found_by_their_namespace() -> None:
    with inside() as wanted, inside(KINETO_OTHER="1") as other:
        found = inhabited(own_namespace())
        (key,) = found[wanted.namespace]
        assert key.pid == wanted.process.pid
        assert other.namespace not in found
        assert own_namespace() not in found


@needs_root
def test_processes_that_look_in_a_folder_need_no_socket_in_their_namespace() -> None:
    with inside(KINETO_USE_DAEMON="1", KINETO_IPC_SOCKET_DIR="/run/ipc") as folder:
        assert folder.namespace not in inhabited(own_namespace())


@needs_root
def test_the_number_of_namespaces_of_a_user_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_namespaces, "MAX_PER_USER", 0)
    with inside() as wanted:
        assert wanted.namespace not in inhabited(own_namespace())


@needs_root
@pytest.mark.usefixtures("unseen")
def test_a_process_in_its_own_network_namespace_is_answered_as_long_as_it_lives() -> None:
    async def run() -> None:
        with inside() as client:
            opener = OnlyThis(client.namespace)
            name = f"\0dynolog{uuid.uuid4()}\0".encode()
            door = PollDoor(namespaces=opener, name=name, look_s=0.05)
            await door.start()
            await soon(lambda: door.state().namespaces == {client.namespace}, "the namespace is served")
            assert await asyncio.to_thread(client.ask) == "''"
            (found,) = await soon(door.processes.all, "the process is known")
            assert found.key.pid == client.process.pid
            await asyncio.to_thread(client.process.communicate)
        await soon(lambda: not door.state().namespaces, "the namespace is left alone")
        await door.stop()

    asyncio.run(run())


@needs_root
@pytest.mark.usefixtures("unseen")
def test_namespaces_are_left_alone_if_nobody_can_say_whether_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        with inside() as client:
            opener = OnlyThis(client.namespace)
            door = PollDoor(namespaces=opener, name=f"\0{uuid.uuid4()}".encode(), look_s=0.01)
            await door.start()
            await soon(lambda: bool(door.state().namespaces), "the namespace is served")
            opener.fails = True
            await soon(lambda: not door.state().namespaces, "the namespace is left alone")
            await door.stop()

    monkeypatch.setattr(poll_door, "MOST_FAILURES", 2)
    asyncio.run(run())


@needs_root
@pytest.mark.usefixtures("unseen")
def test_a_namespace_with_a_daemon_of_its_own_is_left_to_that() -> None:
    with inside(HOLD) as holder:
        keys = inhabited(own_namespace())[holder.namespace]
        with pytest.raises(OSError, match=rf"process {holder.process.pid} \(python.*\) is using @dynolog there"):
            open_in(holder.namespace, keys)


@needs_root
@pytest.mark.usefixtures("unseen")
def test_a_namespace_is_not_entered_for_a_process_that_is_another_by_now() -> None:
    with inside() as client:
        (key,) = inhabited(own_namespace())[client.namespace]
        for wrong in (ProcessKey(key.pid, key.start_time_ns + 1), ProcessKey(os.getpid(), key.start_time_ns)):
            with pytest.raises(OSError, match="has ended, or has left its network namespace"):
                open_in(client.namespace, [wrong])


@needs_root
@pytest.mark.usefixtures("unseen")
def test_nothing_is_left_open_behind_a_socket() -> None:
    with inside() as client:
        (key,) = inhabited(own_namespace())[client.namespace]
        gc.collect()  # what other tests have left
        before = len(list(Path("/proc/self/fd").iterdir()))
        with open_in(client.namespace, [key]) as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED) == 1
            assert (sock.getblocking(), sock.get_inheritable()) == (False, False)
            assert own_namespace() == Path("/proc/thread-self/ns/net").stat().st_ino
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_without_processes_there_is_nothing_to_enter() -> None:
    with pytest.raises(OSError, match="all its processes have ended"):
        open_in(1, [])
