import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kinetoctl.base import own_daemon
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.own_daemon import Child, OwnDaemon, reachable_daemon
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import ChildFailed, Denied, NeedsRoot


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
