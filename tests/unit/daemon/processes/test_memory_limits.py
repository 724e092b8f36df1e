"""What is left below limits of memory: written control groups of both versions, real ones and real limits."""

import resource
from pathlib import Path

import pytest
from kinetod.processes.budgets import (
    MemoryWatch,
    address_room,
    data_room,
    file_room,
    locked_room,
    memory_room,
    stack_bytes,
)
from support.machine import cgroups
from support.machine.cgroups import MIB, Written
from support.service import subjects

V1 = {"memory.limit_in_bytes": 512 * MIB, "memory.usage_in_bytes": 500 * MIB, "memory.memsw.usage_in_bytes": 500 * MIB}
V2 = {"memory.max": 512 * MIB, "memory.high": "max", "memory.current": 500 * MIB}
LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"


def left(made: Written) -> tuple[int, str]:
    room = memory_room(7, made.proc)
    assert room is not None
    return room.left // MIB, room.limit


def test_what_the_kernel_takes_back_counts_as_left(tmp_path: Path) -> None:
    made = Written(tmp_path, version=2)
    stat = f"inactive_file {40 * MIB}\nactive_file {20 * MIB}\nfile_dirty {6 * MIB}\nslab_reclaimable {MIB}"
    made.group("jobs/one", {**V2, "memory.stat": stat})
    assert left(made) == (12 + 40 + 10 - 6 + 1, "memory.max (512 MiB) of the control group /jobs/one")


def test_version_1_counts_the_whole_hierarchy(tmp_path: Path) -> None:
    made = Written(tmp_path, version=1)
    stat = f"inactive_file 0\ntotal_inactive_file {3 * MIB}\ntotal_dirty {MIB}"
    made.group("jobs/one", {**V1, "memory.stat": stat, "memory.memsw.limit_in_bytes": 2**63 - 4096})
    assert left(made) == (14, "memory.limit_in_bytes (512 MiB) of the control group /jobs/one")


def test_the_narrowest_limit_counts_wherever_it_is(tmp_path: Path) -> None:
    made = Written(tmp_path, version=2)
    made.group("jobs/one", V2)
    made.group("jobs", {"memory.max": "max", "memory.high": 1000 * MIB, "memory.current": 995 * MIB})
    assert left(made) == (5, "memory.high (1000 MiB) of the control group /jobs")


def test_memory_and_swap_together_have_a_limit_of_their_own(tmp_path: Path) -> None:
    made = Written(tmp_path, version=1)
    made.group("jobs/one", {**V1, "memory.memsw.limit_in_bytes": 503 * MIB})
    assert left(made)[0] == 3


def test_the_hosts_own_memory_is_a_limit_too(tmp_path: Path) -> None:
    made = Written(tmp_path, version=2)
    made.write(made.proc / "meminfo", "MemAvailable:    9216 kB\nCommitLimit:     4096 kB\nCommitted_AS:    1024 kB\n")
    assert left(made) == (9, "the host's memory")
    made.write(made.proc / "sys/vm/overcommit_memory", "2\n")
    assert left(made) == (3, "the host's commit limit (vm.overcommit_memory is 2)")


def test_nothing_is_known_where_nothing_can_be_seen(tmp_path: Path) -> None:
    assert memory_room(7, tmp_path) is None
    assert MemoryWatch(7, tmp_path).less_than(MIB) is None


def test_a_watch_tells_as_soon_as_less_is_left(tmp_path: Path) -> None:
    made = Written(tmp_path, version=2)
    made.group("jobs/one", {**V2, "memory.stat": f"inactive_file {MIB}"})
    watch = MemoryWatch(7, made.proc)
    assert watch.less_than(12 * MIB) is None
    made.group("jobs/one", {"memory.current": 505 * MIB})
    room = watch.less_than(12 * MIB)
    assert room is not None
    assert room.left == 8 * MIB
    assert watch.less_than(8 * MIB) is None  # cached pages count


def test_limits_of_the_address_space(tmp_path: Path) -> None:
    lines = ("Max address space", 100 * MIB), ("Max data size", 50 * MIB), ("Max stack size", MIB)
    text = "".join(f"{title:26}{soft:<21}unlimited            bytes\n" for title, soft in lines)
    Written.write(tmp_path / "7/limits", LIMITS + text)
    Written.write(tmp_path / "7/status", f"VmSize:\t{90 * 1024} kB\nVmData:\t{20 * 1024} kB\n")
    addresses, data = address_room(7, tmp_path), data_room(7, tmp_path)
    assert addresses is not None
    assert data is not None
    assert (addresses.left, data.left, stack_bytes(7, tmp_path)) == (10 * MIB, 30 * MIB, MIB)
    assert str(addresses) == "10 MiB left within its RLIMIT_AS limit of 100 MiB"


@pytest.mark.parametrize(
    ("locked", "capabilities", "room"),
    [(40, "0", 24 * 1024), (0, "0", None), (40, "4000", None), (40, "nobody", 24 * 1024)],
)
def test_the_limit_of_locked_memory_holds_for_who_locks_it_unprivileged(
    tmp_path: Path, locked: int, capabilities: str, room: int | None
) -> None:
    Written.write(tmp_path / "7/limits", f"{LIMITS}{'Max locked memory':26}{64 * 1024:<21}unlimited            bytes\n")
    Written.write(tmp_path / "7/status", f"CapEff:\t{capabilities}\nVmLck:\t{locked} kB\n")
    found = locked_room(7, tmp_path)
    assert (found.left if found is not None else None) == room


def test_a_process_without_limits_has_none() -> None:
    with subjects.python() as pid:
        assert (address_room(pid), data_room(pid), file_room(pid)) == (None, None, None)
        assert stack_bytes(pid) == resource.getrlimit(resource.RLIMIT_STACK)[0]


def test_a_real_group_of_version_1() -> None:
    with subjects.python() as pid, cgroups.real_group("memory", f"kineto-memory-{pid}") as group:
        group.add(pid)
        group.write("memory.limit_in_bytes", group.number("memory.usage_in_bytes") + 30 * MIB)
        room = memory_room(pid)
        assert room is not None
        assert room.left == pytest.approx(30 * MIB, abs=2 * MIB)
        assert room.limit.endswith(f"of the control group /{group.folder.name}")
