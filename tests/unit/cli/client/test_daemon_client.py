"""The client against a real server: deadlines, error translation, pages."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl import errors
from kinetoctl.client import daemon_client as client_module
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from support.service.fake_profiler import Abort, FakeServer
from support.waiting import scaled

SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.address, timeout_s=5) as made:
        yield made


def test_every_grpc_status_but_ok_has_an_error_class() -> None:
    assert set(client_module.ERRORS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        (grpc.StatusCode.NOT_FOUND, 3),
        (grpc.StatusCode.FAILED_PRECONDITION, 5),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 5),
        (grpc.StatusCode.PERMISSION_DENIED, 6),
        (grpc.StatusCode.UNAVAILABLE, 7),
        (grpc.StatusCode.CANCELLED, 8),
        (grpc.StatusCode.INTERNAL, 1),
    ],
)
def test_the_daemons_words_reason_and_kind_are_kept(
    server: FakeServer, client: Client, code: grpc.StatusCode, exit_code: int
) -> None:
    server.profiler.host = Abort(code, "pid 7 has no agent", reason="NO_AGENT")
    with pytest.raises(errors.CliError) as caught:
        client.host()
    assert str(caught.value) == "pid 7 has no agent"
    assert caught.value.reason_code == "NO_AGENT"
    assert caught.value.exit_code == exit_code


def test_an_error_without_reason_names_the_address(server: FakeServer, client: Client) -> None:
    server.profiler.host = Abort(grpc.StatusCode.UNKNOWN, "boom")
    with pytest.raises(errors.DaemonFault, match=f"the daemon at {server.address} answered UNKNOWN: boom"):
        client.host()


def test_a_call_the_daemon_does_not_know_is_unsupported(server: FakeServer, client: Client) -> None:
    server.profiler.host = Abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
    with pytest.raises(errors.Unsupported, match="does not support this call"):
        client.host()


def test_a_missing_socket_is_named_with_advice(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/none.sock") as client, pytest.raises(errors.Unreachable) as caught:
        client.host()
    assert str(caught.value) == f"no daemon at unix:{tmp_path}/none.sock: there is no such socket"
    assert "kinetod" in caught.value.help_text
    assert "systemctl start kinetod" in caught.value.help_text


def test_a_socket_nobody_listens_on_is_unreachable(tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    path.touch()
    with Client(f"unix:{path}") as client, pytest.raises(errors.Unreachable, match="nothing answers"):
        client.host()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_socket_without_write_permission_is_denied(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    path.touch(mode=0o400)
    with Client(f"unix:{path}") as client, pytest.raises(errors.Denied, match="not writable for you"):
        client.host()


def test_a_daemon_that_does_not_answer_runs_into_the_deadline(server: FakeServer) -> None:
    server.profiler.watches = [[]]
    translated = client_module.translate
    error = _DeadlineError()
    assert isinstance(translated(error, address=server.address, timeout_s=2.5), errors.TimedOut)
    assert (
        str(translated(error, address="unix:/x", timeout_s=2.5)) == "the daemon at unix:/x did not answer within 2.5 s"
    )


class _DeadlineError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_captures_come_page_by_page_up_to_the_limit(server: FakeServer, client: Client) -> None:
    server.profiler.pages = [
        pb.ListCapturesResponse(captures=[pb.Capture(id="3"), pb.Capture(id="2")], next_page_token="next"),
        pb.ListCapturesResponse(captures=[pb.Capture(id="1"), pb.Capture(id="0")], next_page_token="more"),
    ]
    assert [capture.id for capture in client.captures({"team": "vision"}, limit=3)] == ["3", "2", "1"]
    assert [request.page_token for request in server.profiler.requests] == ["", "next"]
    assert dict(server.profiler.requests[1].labels) == {"team": "vision"}


def test_every_error_class_has_an_exit_code_of_its_own_kind() -> None:
    def classes(root: type[errors.CliError]) -> Iterator[type[errors.CliError]]:
        yield root
        for child in root.__subclasses__():
            yield from classes(child)

    found = {cls.__name__: cls.exit_code for cls in classes(errors.CliError)}
    assert ExitCode.DONE not in found.values()
    assert errors.__doc__ is not None
    for name, code in found.items():
        if name != "CliError":
            assert f"{name} " in errors.__doc__, name
            line = next(line for line in errors.__doc__.splitlines() if f"── {name} " in line)
            assert str(code.value) in line


class Stuck:
    """A channel that a Ctrl-C has hit: closing it takes until the test lets it."""

    def __init__(self) -> None:
        self.closing, self.released = threading.Event(), threading.Event()

    def close(self) -> None:
        self.closing.set()
        self.released.wait()


@pytest.fixture
def stuck(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Client, Stuck]]:
    made, channel = Client(server.address), Stuck()
    with monkeypatch.context() as patch:
        patch.setattr(made._connection, "channels", [channel])
        yield made, channel
    channel.released.set()
    made.close()


def test_a_channel_that_does_not_close_is_not_waited_for(stuck: tuple[Client, Stuck]) -> None:
    client, channel = stuck
    client.close(0.01)
    assert channel.closing.wait(scaled(5))


def test_leaving_at_once_waits_for_nothing(stuck: tuple[Client, Stuck], monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = stuck
    monkeypatch.setattr(client_module, "CLOSE_LIMIT_S", 3600.0)
    with pytest.raises(KeyboardInterrupt), client:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("variable", "sent"), [(SPAN, [SPAN]), ("00-none", [])])
def test_the_span_of_whoever_runs_it_goes_with_each_call_if_it_is_a_valid_one(
    server: FakeServer, variable: str, sent: list[str]
) -> None:
    with Client(server.address, timeout_s=5, environ={"TRACEPARENT": variable}) as client:
        client.host()
    assert [value for name, value in server.profiler.metadata if name == "traceparent"] == sent
