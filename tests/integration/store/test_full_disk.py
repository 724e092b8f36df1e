"""One user's capture runs while the disk of the store fills up to the last byte or inode; another user has a trace."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.store.path_guard import folder_bytes
from support.service.calls_as import OK, Answer
from support.service.daemon import Daemon, running_daemon
from support.small_disk import fill, small_disk
from support.two_users import SECOND_NS, User, two_users
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")]


@pytest.fixture(params=["bytes", "inodes"])
def full(request: pytest.FixtureRequest) -> Iterator[tuple[Path, bool]]:
    """A small file system, and whether its inodes run out rather than its bytes."""
    inodes = request.param == "inodes"
    with small_disk("size=20m,mode=755" + (",nr_inodes=120" if inodes else "")) as folder:
        yield folder, inodes


def ask(user: User, name: str, request: object) -> Answer:
    return user.calls.call(user.daemon.address, name, request)  # type: ignore[arg-type]


def fetched(user: User, capture: pb.Capture) -> int:
    (target,), (file,) = capture.targets, capture.targets[0].files
    request = pb.FetchTraceRequest(capture_id=capture.id, pid=target.pid, format=file.format)
    answer = ask(user, "FetchTrace", request)
    assert (answer.code, file.size_bytes) == (OK, sum(len(chunk.data) for chunk in answer.messages))
    return file.size_bytes


def half_written(daemon: Daemon) -> list[Path]:
    return [each for each in daemon.state_dir.rglob("*") if each.suffix in (".tmp", ".part", ".tries")]


def no_raw_records_of(daemon: Daemon, capture_id: str) -> None:
    folder = daemon.state_dir / "captures" / capture_id
    until(lambda: not list(folder.rglob("raw")), "what is superfluous is removed, and frees nothing later")


def folders(daemon: Daemon) -> set[str]:
    return {each.name for each in (daemon.state_dir / "captures").iterdir()}


def test_a_full_disk_ends_the_capture_that_runs_leaves_others_alone_and_nothing_half_written(
    full: tuple[Path, bool],
) -> None:
    disk, inodes = full
    with (
        running_daemon("--min-free-bytes", "0", state_dir=disk / "state") as daemon,
        two_users(daemon) as (ada, bob),
    ):
        done = ask(bob, "GetCapture", pb.GetCaptureRequest(id=bob.capture())).only
        running = ada.create(duration_ns=60 * SECOND_NS).only
        ada.agent.do("collect", "record 20000")
        until(lambda: folder_bytes(daemon.state_dir / "captures" / running.id) > 400_000, "its records are stored")
        no_raw_records_of(daemon, done.id)
        filler = fill(disk, inodes=inodes)
        ada.agent.do("record 2000", "state PROCESS", "result")

        refused = bob.create()
        left = "no inodes are free" if inodes else "0 bytes are free"
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "LOW_DISK")
        assert f"the disk of {daemon.state_dir} is full ({left}); delete captures or free space" in refused.message
        assert fetched(bob, done)
        assert [each.problem for each in ask(bob, "VerifyCapture", pb.VerifyCaptureRequest(id=done.id)).messages] == [
            ""
        ]

        def ended() -> pb.Capture | None:
            now: pb.Capture = ask(ada, "GetCapture", pb.GetCaptureRequest(id=running.id)).only
            return now if now.ended_ns else None

        (target,) = until(ended, "the capture has ended on the full disk", 60).targets
        assert (target.verdict, target.reason_code, len(target.files)) == (pb.VERDICT_FAILED, "DISK_FULL", 0)
        assert half_written(daemon) == []

        deleted = ask(ada, "DeleteCapture", pb.DeleteCaptureRequest(id=running.id))  # which is what the message says
        assert deleted.code == OK, deleted
        assert folders(daemon) == {done.id}
        shutil.rmtree(filler)
        again = bob.capture()
        assert {each.id for each in bob.captures()} == folders(daemon) == {done.id, again}
        assert fetched(bob, done) and ada.captures() == []
