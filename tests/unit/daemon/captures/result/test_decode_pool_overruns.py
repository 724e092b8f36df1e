"""A decoder that was taken over and writes: many files, many bytes, or until the disk is full."""

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.captures.result import decode_pool
from kinetod.captures.result.decode_pool import DecodeError, WorkerPool
from kinetod.captures.target.record_spool import stored_bytes
from kinetod.sandbox import confinement
from support.waiting import soon

COMMAND = (sys.executable, "-P", str(Path(__file__).parents[4] / "support/service/hostile_decoder.py"))
FILES = "import threading\nfor number in range({count}): (own / str(number)).write_bytes(bytes({size}))\n"
WAIT = "threading.Event().wait()"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kinetod.captures.result.decode_pool.WATCH_S", 0.02)
    folder = tmp_path / "capture/target"
    folder.mkdir(parents=True)
    return folder


def ended(own: Path, code: str, room: Callable[[], int] = lambda: 1) -> DecodeError:
    async def job() -> None:
        pool = WorkerPool(1, command=COMMAND, room=room)
        await pool.start()
        try:
            await pool.convert(own, [code], deadline_ns=60 * 10**9)
        finally:
            assert pool.written(own.parent) == 0
            await pool.stop()

    with pytest.raises(DecodeError) as caught:
        asyncio.run(job())
    return caught.value


@pytest.mark.slow
def test_many_files_are_together_no_more_than_one_may_be(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_CHEAP_BYTES", 4 << 20)
    error = ended(own, FILES.format(count=8, size=1 << 20) + WAIT)
    assert error.code == "DECODE_FAILED"
    assert re.match(r"the decoder was killed: it wrote [5-8]\S* MiB, more than these records can produce", error.reason)


def test_files_without_bytes_are_counted_too(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "MAX_FILES", 100)
    error = ended(own, FILES.format(count=101, size=0) + WAIT)
    assert error.reason.startswith("the decoder was killed: it created more than 100 files")


def test_near_the_reserve_of_the_disk_who_has_written_much_ends(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "_MUCH_BYTES", 1 << 20)
    error = ended(own, FILES.format(count=2, size=1 << 20) + WAIT, room=lambda: 0)
    assert error.code == "DISK_FULL"


def test_who_has_written_little_goes_on_and_records_do_not_count(own: Path) -> None:
    (own / "raw/cupti").mkdir(parents=True)
    (own / "raw/cupti/records").write_bytes(bytes(4096))
    look = decode_pool.OutputWatch(own, room=lambda: 0)
    (own / "trace").write_bytes(b"x")
    look.look()
    assert look.bytes == (own / "trace").stat().st_blocks * 512


def test_holes_links_and_deep_folders_cost_what_they_take(own: Path) -> None:
    with (own / "hole").open("wb") as file:
        file.truncate(1 << 40)
    (own / "link").symlink_to("/")
    (own / "a/b/c").mkdir(parents=True)
    files, size = decode_pool.measured(own)
    assert files == 5
    assert size < 1 << 20


def test_a_user_s_share_has_what_decoders_are_writing(own: Path) -> None:
    async def job() -> None:
        pool = WorkerPool(1, command=COMMAND)
        await pool.start()
        task = asyncio.create_task(pool.convert(own, [FILES.format(count=4, size=1 << 20) + WAIT], deadline_ns=10**11))
        await soon(lambda: pool.written(own.parent) >= 4 << 20, "the decoder has written 4 MiB")
        assert pool.written(own.parent.parent / "other") == 0
        task.cancel()
        await asyncio.wait([task])
        await pool.stop()

    asyncio.run(job())


def test_a_target_takes_its_records_until_there_are_files() -> None:
    target = pb.Target(counts=[pb.SourceCounts(bytes=5), pb.SourceCounts(bytes=6)])
    assert stored_bytes(target) == 11
    target.files.add(size_bytes=3)
    assert stored_bytes(target) == 3
