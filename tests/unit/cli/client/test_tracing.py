"""Fetching a stored file: verified, resumed, never over another file."""

import fcntl
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl import errors
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.tracing import ANSWER_LIMIT_S, Outcome, Quiet, await_answer, download, file_name
from support.service import captures
from support.service.captures import CONTENT
from support.service.fake_profiler import Abort, FakeProfiler, FakeServer, serve

NAME = "kineto-gpu-7-4242-c0ffee.json.gz"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serve(FakeProfiler(content=CONTENT, chunk_bytes=64 << 10)) as running:
        yield running


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.address, timeout_s=5) as made:
        yield made


def fetch(client: Client, directory: Path) -> Path:
    target = captures.done_target()
    return download(client, captures.capture(target), target, captures.trace_file(), directory)


def offsets(server: FakeServer) -> list[int]:
    return [request.offset for request in server.profiler.requests]


def test_the_file_has_the_announced_bytes_and_no_part_stays(client: Client, tmp_path: Path) -> None:
    path = fetch(client, tmp_path)
    assert path == tmp_path / NAME
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


def test_an_empty_file_is_a_file(server: FakeServer, client: Client, tmp_path: Path) -> None:
    target = captures.done_target(content=b"")
    path = download(client, captures.capture(target), target, captures.trace_file(b""), tmp_path)
    assert path.read_bytes() == b""


def test_a_broken_stream_goes_on_where_it_stopped(server: FakeServer, client: Client, tmp_path: Path) -> None:
    server.profiler.fetch_limits = [100_000, Abort(grpc.StatusCode.UNAVAILABLE), 64 << 10]
    assert fetch(client, tmp_path).read_bytes() == CONTENT
    assert offsets(server) == [0, 100_000, 100_000, 165_536]


def test_what_an_earlier_download_left_is_used(server: FakeServer, client: Client, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:70_000])
    assert fetch(client, tmp_path).read_bytes() == CONTENT
    assert offsets(server) == [70_000]


def test_wrong_bytes_of_an_earlier_download_are_fetched_again(
    server: FakeServer, client: Client, tmp_path: Path
) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    assert fetch(client, tmp_path).read_bytes() == CONTENT
    assert offsets(server) == [1000, 0]


def test_a_part_longer_than_the_file_is_thrown_away(server: FakeServer, client: Client, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT + b"more")
    assert fetch(client, tmp_path).read_bytes() == CONTENT
    assert offsets(server) == [0]


def test_a_wrong_hash_leaves_no_file(server: FakeServer, client: Client, tmp_path: Path) -> None:
    server.profiler.content = b"y" * len(CONTENT)
    with pytest.raises(errors.VerificationFailed, match="the SHA-256 of the received chrome file is"):
        fetch(client, tmp_path)
    assert not (tmp_path / NAME).exists()


def test_too_few_bytes_leave_no_file(server: FakeServer, client: Client, tmp_path: Path) -> None:
    server.profiler.content = CONTENT[:-1]
    with pytest.raises(errors.VerificationFailed, match="after 307199 of 307200 bytes"):
        fetch(client, tmp_path)
    assert not (tmp_path / NAME).exists()


def test_the_same_file_that_is_there_already_is_not_fetched(server: FakeServer, client: Client, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(CONTENT)
    assert fetch(client, tmp_path) == tmp_path / NAME
    assert offsets(server) == []


def test_another_file_of_the_name_is_not_overwritten(client: Client, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"precious")
    with pytest.raises(errors.FileConflict, match="exists and is not this trace"):
        fetch(client, tmp_path)
    assert (tmp_path / NAME).read_bytes() == b"precious"


def test_two_downloads_of_one_file_do_not_mix(client: Client, tmp_path: Path) -> None:
    with (tmp_path / f"{NAME}.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(errors.FileConflict, match="another kinetoctl is writing "):
            fetch(client, tmp_path)


def test_an_error_of_the_daemon_is_not_tried_again(server: FakeServer, client: Client, tmp_path: Path) -> None:
    server.profiler.fetch_limits = [Abort(grpc.StatusCode.NOT_FOUND, "deleted", reason="NO_SUCH_FILE")]
    with pytest.raises(errors.NotFound, match="deleted"):
        fetch(client, tmp_path)
    assert offsets(server) == [0]


def test_a_write_that_fails_is_named_with_the_file_and_goes_on_later(client: Client, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(errors.DownloadFailed, match=rf"{NAME}\.part: File too large"):
            fetch(client, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:100_000]
    assert fetch(client, tmp_path).read_bytes() == CONTENT


def test_a_link_in_the_place_of_the_part_is_not_followed(client: Client, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / f"{NAME}.part").symlink_to(tmp_path / "victim")
    with pytest.raises(errors.DownloadFailed, match="symbolic links"):
        fetch(client, tmp_path)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_pipe_in_the_place_of_the_part_is_refused(client: Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{NAME}.part")
    with pytest.raises(errors.FileConflict, match="is not a regular file"):
        fetch(client, tmp_path)


def test_names_of_the_daemon_cannot_leave_the_folder() -> None:
    capture = pb.Capture(id="../../etc/x", host="..", targets=[captures.done_target()])
    file = pb.TraceFile(format="../odd")
    assert file_name(capture, capture.targets[0], file) == "kineto-_-4242-_.._etc_x._odd"


class Waiting(Quiet):
    """A clock that only pauses move, what is done in a pause, and the notes of progress."""

    def __init__(self, in_pause: Callable[[], None] = lambda: None) -> None:
        self.now_s = 0.0
        self.notes: list[str] = []
        self._in_pause = in_pause

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        self._in_pause()

    def note(self, text: str) -> None:
        self.notes.append(text)


def answered(client: Client, waiting: Waiting, *targets: pb.Target) -> Outcome:
    outcome = Outcome(captures.capture(*targets, status=pb.CAPTURE_STATUS_DONE))
    await_answer(client, outcome, waiting, clock=waiting.clock, pause=waiting.pause)
    return outcome


def test_the_answer_is_awaited_for_as_long_as_the_daemon_looks_for_it(server: FakeServer, client: Client) -> None:
    server.profiler.answered = False

    def find() -> None:
        server.profiler.stored.answer.verdict = "A step takes 2 ms."  # type: ignore[union-attr]

    assert answered(client, Waiting(find), captures.done_target()).capture.answer.verdict == "A step takes 2 ms."


def test_an_answer_that_does_not_come_is_awaited_for_a_few_seconds(server: FakeServer, client: Client) -> None:
    server.profiler.answered, waiting = False, Waiting()
    assert not answered(client, waiting, captures.done_target()).capture.HasField("answer")
    assert ANSWER_LIMIT_S <= waiting.now_s < ANSWER_LIMIT_S + 1
    assert waiting.notes == ["analysing"]


def test_an_answer_that_will_not_come_is_not_awaited(server: FakeServer, client: Client) -> None:
    waiting = Waiting()
    answered(client, waiting, captures.done_target())
    snapshot = captures.trace_file(file_format="memory-snapshot")
    for target in (captures.target(), captures.target(files=(snapshot,))):
        server.profiler.answered = False
        answered(client, waiting, target)
    assert (waiting.now_s, waiting.notes, len(server.profiler.requests)) == (0.0, [], 1)


def test_a_daemon_that_fails_and_ctrl_c_end_the_wait_for_the_answer(server: FakeServer, client: Client) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    server.profiler.answered = False
    assert answered(client, Waiting(interrupt), captures.done_target()).interrupted
    server.profiler.stored = Abort(grpc.StatusCode.NOT_FOUND)
    assert not answered(client, Waiting(interrupt), captures.done_target()).interrupted
