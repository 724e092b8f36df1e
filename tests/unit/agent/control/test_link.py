import contextlib
import os
import socket
from pathlib import Path
from typing import Any, List, Tuple

import pytest
from kineto_agent.control import link as module
from kineto_agent.control.link import Link, LinkClosed, vouched_for
from kineto_agent.protocol import wire
from support.agent.agent_daemon import Connection, Daemon
from support.agent.plugins import sealed_bytes
from support.machine.descriptors import open_files
from support.waiting import until

S = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1000 * S

    def __call__(self) -> int:
        return self.now_ns


def a_link(*paths: Path, clock: "Clock | None" = None) -> Link:
    return Link(lambda: [str(path) for path in paths], clock or Clock())


def receive(link: Link) -> wire.Message:
    received: List[wire.Message] = []

    def arrived() -> bool:
        message = link.receive()
        if message is not None:
            received.append(message)
        return bool(received)

    until(arrived, "a message arrives")
    return received[0]


def expect_closed(link: Link) -> str:
    reasons: List[str] = []

    def closed() -> bool:
        try:
            link.receive()
        except LinkClosed as exc:
            reasons.append(str(exc))
        return bool(reasons)

    until(closed, "the link is closed")
    assert not link.connected
    return reasons[0]


def test_the_first_socket_with_a_daemon_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no socket")
    link = a_link(tmp_path / "none", tmp_path / "file", tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        assert link.connect()
        link.send(wire.Describe())
        assert daemon.accept().receive() == wire.Describe()
        link.close("end")


def test_a_daemon_of_another_user_is_not_spoken_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(socket.socket):
        def getsockopt(self, *_arguments: int) -> Any:
            return module._UCRED.pack(1, 12345, 12345)

    monkeypatch.setattr(module, "socket", Elsewhere)
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")):
        assert not link.connect()
        assert not link.connected


def test_the_back_off_doubles_to_a_minute_and_begins_anew_after_a_welcome(tmp_path: Path) -> None:
    clock = Clock()
    link = a_link(tmp_path / "none", clock=clock)
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        assert not link.connect()
        wait_ns = link.retry_at_ns - clock.now_ns
        assert seconds * S // 2 <= wait_ns < seconds * S * 3 // 2
    link.welcomed()
    link.connect()
    assert link.retry_at_ns - clock.now_ns < 3 * S // 2


def test_a_refused_agent_stays_silent_and_comes_back_ten_minutes_later(tmp_path: Path) -> None:
    clock = Clock()
    link = a_link(tmp_path / "d.sock", clock=clock)
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        connection = daemon.accept()
        link.refuse("old version")
        link.send(wire.Describe())
        connection.close()
        assert expect_closed(link) == "the daemon closed the connection"
        assert link.retry_at_ns == clock.now_ns + 600 * S


def test_a_refusal_before_the_hang_up_is_not_lost(tmp_path: Path) -> None:
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        connection = daemon.accept()
        connection.send(wire.Refuse("old version"))
        connection.close()
        assert receive(link) == wire.Refuse("old version")
        link.close("end")


def test_another_protocol_version_counts_as_a_refusal(tmp_path: Path) -> None:
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        connection = daemon.accept()
        frame = bytearray(wire.encode(wire.Describe()))
        frame[4] = 2
        connection.socket.send(bytes(frame))
        until(lambda: link.receive() is None and link.refused, "the link knows that it is refused")
        assert link.connected
        link.close("end")


@pytest.mark.parametrize(
    "nonsense",
    [b"x", b"GET / HTTP/1.1", b"KNTO\x01\x00" + b"\xff" * 20, b"y" * 70000],
    ids=["short", "http", "payload", "long"],
)
def test_nonsense_from_the_daemon_closes_the_link(tmp_path: Path, nonsense: bytes) -> None:
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        daemon.accept().socket.send(nonsense)
        assert "the daemon sent" in expect_closed(link)
        assert link.retry_at_ns > 1000 * S


def test_frames_wait_in_order_while_the_daemon_does_not_read(tmp_path: Path) -> None:
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        connection = daemon.accept()
        sent = 0
        while not link.wants_write:
            link.send(wire.Refuse("%05d" % sent + "x" * 30000))
            sent += 1
        read, write = os.pipe()
        link.send(wire.Arena("c1", "s", "f", {}), [read])
        os.close(read)
        for number in range(sent):
            message = connection.receive()
            assert isinstance(message, wire.Refuse)
            assert message.reason[:5] == "%05d" % number
            link.flush()
        frame, ancillary, _flags, _address = connection.socket.recvmsg(1000, 100)
        assert wire.decode(frame) == wire.Arena("c1", "s", "f", {})
        os.close(int.from_bytes(ancillary[0][2], "little"))
        os.close(write)
        assert not link.wants_write
        link.close("end")


def test_a_file_of_the_programs_is_neither_sent_nor_closed(tmp_path: Path) -> None:
    """It closed the numbers of what waits to be sent, and has a file of its own there."""
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon, (tmp_path / "theirs").open("w") as theirs:
        link.connect()
        connection = daemon.accept()
        while not link.wants_write:
            link.send(wire.Refuse("x" * 30000))
        read, write = os.pipe()
        link.send(wire.Arena("c1", "s", "f", {}), [read])
        copy = link._queue[-1].descriptors[0]
        os.dup2(theirs.fileno(), copy)
        with pytest.raises(LinkClosed, match="the program closed the agent's descriptors"):
            while True:
                connection.receive()
                link.flush()
        assert os.fstat(copy).st_ino == os.fstat(theirs.fileno()).st_ino
        for number in (copy, read, write):
            os.close(number)


def test_a_daemon_that_never_reads_is_given_up(tmp_path: Path) -> None:
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        daemon.accept()
        with pytest.raises(LinkClosed, match="the daemon is not reading: 256 frames are waiting"):
            for _ in range(2000):
                link.send(wire.Refuse("x" * 30000))
        assert not link.wants_write


def test_sending_to_a_dead_daemon_raises_no_signal(tmp_path: Path) -> None:
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        daemon.accept().close()
        with pytest.raises(LinkClosed, match=r"sending failed: .*Broken pipe"):
            link.send(wire.Describe())


def test_a_number_that_now_belongs_to_the_program_is_left_alone(tmp_path: Path) -> None:
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        daemon.accept()
        number = link.fileno()
        with (tmp_path / "users.txt").open("w") as stream:
            os.dup2(stream.fileno(), number)
            with pytest.raises(LinkClosed, match="the program closed the agent's descriptor"):
                link.send(wire.Describe())
            os.write(number, b"still mine")
            os.close(number)
        assert (tmp_path / "users.txt").read_text() == "still mine"


def test_a_message_that_is_too_long_harms_nothing(tmp_path: Path) -> None:
    link = a_link(tmp_path / "d.sock")
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link.connect()
        connection = daemon.accept()
        with pytest.raises(wire.WireError):
            link.send(wire.Refuse("x" * 70000))
        link.send(wire.Describe())
        assert connection.receive() == wire.Describe()
        link.close("end")


# ---------------------------------------------------------------- after a live attach


def test_an_adopted_socket_is_connected_and_not_looked_for_again() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        link = Link.adopted(ours)
        assert link.connected
        assert not link.ended
        theirs.send(wire.encode(wire.Describe()))
        assert receive(link) == wire.Describe()
    assert expect_closed(link) == "the daemon closed the connection"
    assert link.ended
    assert ours.fileno() == -1


def test_a_link_that_looks_for_daemons_never_ends(tmp_path: Path) -> None:
    link = a_link(tmp_path / "none")
    assert not link.connect()
    assert not link.ended


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_vouches_for_the_user_to_whom_it_has_given_a_folder_in_run(tmp_path: Path) -> None:
    run, other = str(tmp_path), os.getuid() + 12345
    folder = tmp_path / "kineto"
    folder.mkdir()
    path = str(folder / "agent.sock")
    tmp_path.chmod(0o755)
    os.chown(folder, other, other)
    assert vouched_for(path, other, run)
    assert not vouched_for(path, other + 1, run)
    assert not vouched_for(path, other)  # not in /run
    assert not vouched_for(str(folder / "deeper/agent.sock"), other, run)
    tmp_path.chmod(0o777)  # anybody could have made the folder
    assert not vouched_for(path, other, run)
    tmp_path.chmod(0o755)
    folder.rename(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    assert not vouched_for(path, other, run)
    assert not vouched_for(str(tmp_path / "nowhere/agent.sock"), other, run)


# ------------------------------------------------------------ descriptors


def is_open(inode: int) -> bool:
    """Whether a descriptor of this process names it; other tests may have left some that go away meanwhile."""
    found = []
    for number in open_files(os.getpid()):
        with contextlib.suppress(OSError):
            found.append(os.fstat(number).st_ino)
    return inode in found


def sent(connection: Connection, message: wire.Message, count: int = 1) -> List[int]:
    """Sends the message with so many descriptors. Returns their inodes."""
    descriptors = [sealed_bytes(b"content") for _ in range(count)]
    inodes = [os.fstat(number).st_ino for number in descriptors]
    connection.send_with(message, *descriptors)
    return inodes


def connected(daemon: Daemon) -> Tuple[Link, Connection]:
    link = a_link(Path(daemon.path))
    assert link.connect()
    return link, daemon.accept()


PLUGINS = wire.Plugins("digest", ["toy"])


def test_the_descriptor_of_a_message_is_the_callers_once_it_was_asked_for(tmp_path: Path) -> None:
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link, connection = connected(daemon)
        connection.send_with(PLUGINS, sealed_bytes(b"content"))
        assert receive(link) == PLUGINS
        descriptor = link.descriptor()
        assert os.pread(descriptor, 99, 0) == b"content"
        assert not os.get_inheritable(descriptor)
        assert link.descriptor() == -1
        link.close("end")
        os.close(descriptor)


def test_a_descriptor_that_nobody_asked_for_is_closed(tmp_path: Path) -> None:
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link, connection = connected(daemon)
        (first,) = sent(connection, PLUGINS)
        receive(link)
        assert is_open(first)
        connection.send(wire.Describe())
        receive(link)
        assert not is_open(first)
        (second,) = sent(connection, PLUGINS)
        receive(link)
        own = os.fstat(link.fileno()).st_ino
        link.close("end")
        assert not is_open(second)
        assert not is_open(own)


@pytest.mark.parametrize(
    ("message", "count"), [(PLUGINS, 0), (PLUGINS, 2), (wire.Describe(), 1), (PLUGINS, 20)], ids=str
)
def test_another_number_of_descriptors_ends_the_link(tmp_path: Path, message: wire.Message, count: int) -> None:
    with Daemon(str(tmp_path / "d.sock")) as daemon:
        link, connection = connected(daemon)
        own = os.fstat(link.fileno()).st_ino
        inodes = sent(connection, message, count)
        assert "descriptor" in expect_closed(link)
        assert not [inode for inode in (own, *inodes) if is_open(inode)]
