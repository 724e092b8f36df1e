"""Disks that are full, folders that are removed, clocks that are set, while captures run."""

import random
import time

import pytest
from campaign.parts.faults import site
from campaign.parts.faults_host import (
    fill_disk,
    on_small_disk,
    remove_sockets,
    remove_store,
    set_clock,
    with_own_clock,
)
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.daemon import watch_to_end
from support.waiting import scaled, until

pytestmark = pytest.mark.slow

HOUR_S = 3600


def test_a_full_disk_ends_captures_with_a_true_verdict_and_leaves_nothing_behind() -> None:
    with on_small_disk() as host:
        host.note_before()
        fill_disk(host, random.Random(), longest_full_s=1.0)
        host.forget()
        host.note_after()


def test_a_store_that_is_removed_is_made_again_and_running_captures_are_told() -> None:
    with site() as host:
        host.note_before()
        remove_store(host, random.Random())
        host.forget()
        host.note_after()


def test_sockets_that_are_removed_are_made_again_and_captures_go_on() -> None:
    with site() as host:
        host.note_before()
        remove_sockets(host, random.Random())
        host.forget()
        host.note_after()


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_clock_that_is_set_in_the_window_makes_the_trace_partial_and_removes_nothing(hours: int) -> None:
    with with_own_clock(agents=1) as (host, clock):
        host.note_before()
        stub = host.daemon.stub()
        kept = watch_to_end(stub, host.begin(*host.pids()).id)
        assert kept.status == pb.CAPTURE_STATUS_DONE
        begun, began = host.begin(*host.pids(), milliseconds=5000), time.monotonic()
        until(
            lambda: any(
                each.records
                for each in stub.GetCapture(pb.GetCaptureRequest(id=begun.id), timeout=scaled(10)).targets[0].counts
            ),
            "it records",
        )
        clock.set_forward(hours * HOUR_S)
        (target,) = watch_to_end(stub, begun.id).targets
        assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "CLOCK_SET")
        assert f"{'forward' if hours > 0 else 'back'} by " in target.reason
        assert time.monotonic() - began < scaled(20)  # not an hour later
        clock.set_forward(0)
        set_clock(host, clock, random.Random())  # checks the first capture too
        host.forget()
        host.note_after()
