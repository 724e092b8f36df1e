import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.base import own_daemon
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.own_daemon import Child, OwnDaemon, has_only_our_rights, reachable_daemon
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.tracing import Outcome
from kinetoctl.commands.trace import end_with
from kinetoctl.errors import ChildFailed, Denied, DownloadFailed, NeedsRoot
from support.service import captures


def reached(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[Client, list[str]]:
    """The client that a command gets for a socket, and the lines that it prints for that."""

    @contextmanager
    def started(_prefix: str, *, timeout_s: float) -> Iterator[OwnDaemon]:
        client = OwnDaemon(path.parent, timeout_s=timeout_s)
        with client:
            yield client

    monkeypatch.setattr(own_daemon, "own_daemon", started)
    options = {"address": f"unix:{path}", "output": "table", "color": False, "quiet": False, "timeout_s": 1.0}
    lines: list[str] = []
    with reachable_daemon(CommonOptions(**{**options, **changes}), lambda text, err: lines.append(text)) as client:  # type: ignore[arg-type]
        return client, lines


def test_a_daemon_is_started_where_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, lines = reached(tmp_path / "none.sock", monkeypatch)
    assert isinstance(client, OwnDaemon) and not client.outlives_command
    assert lines == ["kinetod is not running here: starting one for the duration of this command"]


@pytest.mark.parametrize(("uid", "code"), [(1000, "ATTACH_NOT_PERMITTED"), (0, "ATTACH_NOT_PERMITTED"), (1000, "")])
def test_what_the_kernel_lets_only_root_do_is_told_with_roots_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, code: str
) -> None:
    @contextmanager
    def started(_prefix: str, *, timeout_s: float) -> Iterator[OwnDaemon]:
        yield OwnDaemon(tmp_path, timeout_s=timeout_s)

    monkeypatch.setattr(own_daemon, "own_daemon", started)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("sys.argv", ["kinetoctl", "trace", "7", "--label", "a b=c"])
    settings = CommonOptions(address=f"unix:{tmp_path}/none", output="table", color=False, quiet=True, timeout_s=1.0)
    with pytest.raises(Denied) as caught, reachable_daemon(settings, print):
        raise Denied("process 7 cannot be attached to", reason_code=code)
    found = re.fullmatch(
        r"process 7 cannot be attached to\nRoot can trace it: sudo \S+ -P -m kinetoctl trace 7 --label 'a b=c'",
        str(caught.value),
    )
    assert (found is not None, isinstance(caught.value, NeedsRoot)) == (bool(uid and code), bool(uid and code))


@contextmanager
def listening(path: Path, uid: int) -> Iterator[None]:
    """A socket whose owner is this user for those who connect: who listened, which only root may feign."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        if (own := os.geteuid()) != uid:
            os.seteuid(uid)
        listener.listen()
        if own != uid:
            os.seteuid(own)
        yield


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to listen as another user")
@pytest.mark.parametrize(("daemon", "caller", "told"), [(1000, 1000, True), (0, 1000, False), (0, 0, False)])
@pytest.mark.parametrize("given", [True, False])
def test_so_it_is_by_a_daemon_that_this_user_has_started_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon: int, caller: int, told: bool, given: bool
) -> None:
    address = f"unix:{tmp_path}/own.sock"
    monkeypatch.setattr("sys.argv", ["kinetoctl", *(["--address", address] if given else []), "trace", "7"])
    settings = CommonOptions(
        address=address, address_given=given, output="table", color=False, quiet=True, timeout_s=1.0
    )
    with listening(tmp_path / "own.sock", daemon), pytest.raises(Denied) as caught:
        monkeypatch.setattr("os.geteuid", lambda: caller)
        with reachable_daemon(settings, print):
            raise Denied("process 7 cannot be attached to", reason_code="ATTACH_NOT_PERMITTED")
    assert bool(re.search(r"\nRoot can trace it: sudo \S+ -P -m kinetoctl trace 7$", str(caught.value))) == told


def test_a_daemon_elsewhere_or_gone_has_no_rights_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert not has_only_our_rights(Client("127.0.0.1:1"))
    assert not has_only_our_rights(Client(f"unix:{tmp_path}/none.sock"))


def test_so_it_is_where_a_daemon_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "left.sock"))
    client, lines = reached(tmp_path / "left.sock", monkeypatch, quiet=True)
    assert (isinstance(client, OwnDaemon), lines) == (True, [])


def test_one_that_listens_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "a.sock"))
        listener.listen()
        client, lines = reached(tmp_path / "a.sock", monkeypatch)
    assert (client.address, client.outlives_command, lines) == (f"unix:{tmp_path}/a.sock", True, [])


def test_an_address_that_is_given_is_used_whoever_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, lines = reached(tmp_path / "none.sock", monkeypatch, address_given=True)
    assert (client.outlives_command, lines) == (True, [])


def test_a_child_that_ends_early_shows_what_it_wrote_last(tmp_path: Path) -> None:
    with Child("the daemon", ("sh", "-c", "echo no room; exit 3"), tmp_path / "log") as child:
        with pytest.raises(ChildFailed) as caught:
            child.poll(lambda: False, 60, "did not answer")
        assert str(caught.value) == "the daemon ended with status 3\n  | no room"


def test_a_child_that_is_late_is_told_with_the_limit(tmp_path: Path) -> None:
    with (
        Child("the daemon", ("sleep", "600"), tmp_path / "log") as child,
        pytest.raises(ChildFailed, match=r"^the daemon did not answer within 0 s\n  \| \(its log is empty\)$"),
    ):
        child.poll(lambda: False, 0, "did not answer")
    assert child.process.returncode is not None


@pytest.mark.parametrize("uid", [1000, 0])
def test_what_only_root_may_trace_is_told_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr("sys.argv", ["kinetoctl", "trace", "7", "--label", "a b=c"])
    refused = captures.target(
        state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_FAILED, reason_code="ATTACH_NOT_PERMITTED"
    )
    daemon = OwnDaemon(tmp_path)
    end_with(daemon, Outcome(captures.capture(refused)))
    said = capsys.readouterr().err
    assert bool(re.fullmatch(r"Root can trace it: sudo \S+ -P -m kinetoctl trace 7 --label 'a b=c'\n", said)) == bool(
        uid
    )
    assert not daemon.keeps_folder


def test_what_could_not_be_downloaded_stays_where_its_daemon_had_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = OwnDaemon(tmp_path)
    end_with(daemon, Outcome(captures.capture(captures.done_target()), problems=[DownloadFailed("the disk is full")]))
    assert daemon.keeps_folder
    assert (
        capsys.readouterr().err
        == f"To download the missing files later, start their daemon again: kinetod --state-dir {tmp_path}/state\n"
    )
