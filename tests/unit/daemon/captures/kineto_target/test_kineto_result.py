"""What becomes of libkineto's file in the store."""

import asyncio
from pathlib import Path
from typing import Any, cast

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.target_info import TargetInfo
from kinetod.captures.kineto_target.kineto_result import store_kineto_file
from kinetod.captures.result.verdict import DONE
from support.small_disk import fill, small_disk

INFO = TargetInfo(capture_id="c1", host="h", pid=99, process_name="python")


def stored(folder: Path) -> pb.Target:
    target = pb.Target(pid=99)
    nothing = cast("Any", None)  # of the daemon: nothing is decoded before what is known of the target is stored
    asyncio.run(store_kineto_file(nothing, target, folder, ("chrome",), INFO, DONE))
    return target


def test_a_full_disk_is_told_from_a_store_that_was_removed(tmp_path: Path) -> None:
    gone = stored(tmp_path / "gone")
    assert (gone.verdict, gone.reason_code) == (pb.VERDICT_FAILED, "STORE_IO")
    with small_disk("size=8k,nr_inodes=8") as disk:
        fill(disk, inodes=True)
        full = stored(disk)
    assert (full.verdict, full.reason_code) == (pb.VERDICT_FAILED, "DISK_FULL")
    assert full.reason.endswith("; free space or delete captures")
