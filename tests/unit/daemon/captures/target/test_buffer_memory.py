"""How large the buffers of a capture may be: by what is left, by its sources, by what others were promised."""

from typing import Any

import pytest
from kineto_agent.protocol import wire
from kinetod.captures.result.verdict import EndState
from kinetod.captures.target.buffer_memory import (
    LEAST_LEFT_BYTES,
    FittedBuffers,
    MemoryShare,
    Promises,
    fit,
    needed_bytes,
    wanted_sources,
)
from kinetod.processes.budgets import Room
from support.machine import cgroups
from support.machine.cgroups import MIB
from support.service import subjects

OFFERED = {
    "python_stacks": ["python_function"],
    "torch_ops": ["cpu_op", "user_annotation"],
    "memory": ["memory_snapshot"],
    "memory_events": ["cpu_instant_event"],
}
LIMIT = "memory.max (512 MiB) of the control group /jobs/one"


def start(*types: str, limit: int = 128 * MIB, **options: Any) -> wire.Start:
    return wire.Start("c1", list(types), 10**9, None, None, 0, 0, 0, 0, limit, None, options)


def fitted(sources: list[str], left: int, request: wire.Start | None = None) -> FittedBuffers:
    room = Room(left, LIMIT, "give the container or job a higher memory limit")
    return fit(request or start(), sources, [(room, left)])


@pytest.mark.parametrize(
    ("request_", "sources"),
    [
        (start(), ["python_stacks", "torch_ops"]),
        (start("cpu_op"), ["torch_ops"]),
        (start("cpu_op", profile_memory=True), ["torch_ops", "memory_events"]),
        (start("memory_snapshot"), ["memory"]),
    ],
)
def test_the_sources_that_a_request_may_start(request_: wire.Start, sources: list[str]) -> None:
    assert wanted_sources(request_, OFFERED) == sources


def test_where_there_is_room_nothing_changes() -> None:
    taken = fitted(["python_stacks", "torch_ops"], 1024 * MIB)
    assert (taken.request, taken.warning, taken.refused) == (start(), "", None)
    assert taken.size == (8 + 128 + 16) * MIB


def test_where_no_limit_is_known_nothing_changes() -> None:
    assert fit(start(), ["torch_ops"], []).request == start()


def test_buffers_are_shrunk_to_half_of_what_is_left() -> None:
    taken = fitted(["python_stacks", "torch_ops"], 100 * MIB)
    assert taken.request.buffer_limit_bytes == 16 * MIB
    assert taken.size <= 50 * MIB
    assert taken.warning == (
        "the buffers were reduced from 128 MiB to 16 MiB for each source: 100 MiB left within memory.max (512 MiB) "
        "of the control group /jobs/one; records may be dropped"
    )


def test_the_program_always_keeps_some() -> None:
    taken = fitted(["python_stacks"], LEAST_LEFT_BYTES + 4 * MIB)
    assert taken.request.buffer_limit_bytes == 2 * MIB
    assert taken.size == 4 * MIB


@pytest.mark.parametrize(("sources", "left"), [(["python_stacks"], 5 * MIB), (["cupti"], 60 * MIB), (["torch_ops"], 0)])
def test_where_the_least_does_not_fit_the_capture_is_refused(sources: list[str], left: int) -> None:
    refused = fitted(sources, left).refused
    assert refused is not None
    assert (refused.outcome, refused.code) == (EndState.FAILED, "NO_MEMORY")
    assert f"left within {LIMIT}, but this capture needs" in refused.reason
    assert refused.reason.endswith("give the container or job a higher memory limit")


@pytest.mark.parametrize(("limit", "buffers"), [(MIB, None), (40 * MIB, 8 * MIB), (1024 * MIB, 128 * MIB)])
def test_no_buffer_is_larger_than_the_files_that_the_process_may_write(limit: int, buffers: int | None) -> None:
    with subjects.python(f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))") as pid:
        taken = MemoryShare(Promises(), pid).take(start(), {"torch_ops": OFFERED["torch_ops"]})
        if buffers is not None:
            assert (taken.refused, taken.request.buffer_limit_bytes) == (None, buffers)
        else:
            assert taken.refused is not None
            assert "1 MiB left within its RLIMIT_FSIZE limit of 1 MiB" in taken.refused.reason


def test_what_is_promised_to_others_is_no_reason_to_refuse() -> None:
    room = Room(100 * MIB, LIMIT, "give it more")
    taken = fit(start(), ["torch_ops"], [(room, -5 * MIB)])
    assert (taken.refused, taken.request.buffer_limit_bytes) == (None, MIB)


def test_torchs_own_profiler_takes_more_than_its_buffers() -> None:
    usual, profiler = (
        needed_bytes(start(**options), ["torch_ops"], 64 * MIB) for options in ({}, {"with_flops": True})
    )
    assert profiler == usual + 128 * MIB


def test_what_others_were_promised_below_the_same_limit_is_gone() -> None:
    promises = Promises()
    first, second = object(), object()
    promises.note(first, LIMIT, 30)
    promises.note(second, "another", 7)
    assert (promises.others(first, LIMIT), promises.others(second, LIMIT)) == (0, 30)
    promises.forget(first)
    assert promises.others(second, LIMIT) == 0


def test_captures_of_one_group_share_what_is_left_and_are_ended_before_it_is_used_up() -> None:
    with subjects.python() as pid, cgroups.real_group("memory", f"kineto-room-{pid}") as group:
        group.add(pid)
        group.write("memory.limit_in_bytes", group.number("memory.usage_in_bytes") + 64 * MIB)
        promises = Promises()
        first, second = (MemoryShare(promises, pid) for _ in range(2))
        sizes = [share.take(start(), {"torch_ops": ["cpu_op"]}).size for share in (first, second)]
        assert 32 * MIB >= sizes[0] > sizes[1] >= 2 * MIB
        assert first.due()
        assert first.shortage() is None
        assert not first.due()
        group.write("memory.limit_in_bytes", group.number("memory.usage_in_bytes") + 5 * MIB)
        ending = first.shortage()
        assert ending is not None
        assert (ending.outcome, ending.code) == (EndState.PARTIAL, "MEMORY_SHORT")
        assert f"process {pid} was running out of memory" in ending.reason
        first.give_back()
        assert second.take(start(), {"torch_ops": ["cpu_op"]}).refused is not None


@pytest.mark.parametrize("left", [7, 8])
def test_a_capture_of_a_process_that_has_an_agent_is_refused_near_a_limit(left: int) -> None:
    with subjects.python(f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({3 + left}, 4096))") as pid:
        refused = MemoryShare(Promises(), pid).take(start(), OFFERED).refused
    assert (refused is not None) == (left < 8)
    if refused is not None:
        assert (refused.outcome, refused.code) == (EndState.FAILED, "ATTACH_LIMIT")
        assert f"{left} descriptors left within its RLIMIT_NOFILE limit" in refused.reason
        assert "; a capture needs 8 descriptors; raise its limit: `prlimit" in refused.reason
