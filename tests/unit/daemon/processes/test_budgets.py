"""How many threads, descriptors and mappings are left: written folders, a real pids control group, real processes."""

from pathlib import Path

import pytest
from kinetod.processes.budgets import Room, descriptor_room, mapping_room, thread_room
from support.machine import cgroups
from support.machine.cgroups import Written
from support.service import subjects

STATUS = "Name:\tjob\nUid:\t{uid}\t0\t0\t0\nThreads:\t{threads}\nCapEff:\t{capabilities:016x}\n"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\n{:26}{:<21}50 processes\n"
CAP_SYS_RESOURCE = 1 << 24


def user(folder: Path, *, limit: int, uid: int = 1000, capabilities: int = 0, on_host: int = 900) -> None:
    """Process 7 of a user who has 20 threads in all, of 900 on the host."""
    for pid, threads in ((7, 5), (8, 15)):
        Written.write(folder / f"{pid}/status", STATUS.format(uid=uid, threads=threads, capabilities=capabilities))
    Written.write(folder / "9/status", STATUS.format(uid=uid + 1, threads=800, capabilities=0))
    Written.write(folder / "7/limits", LIMITS.format("Max processes", limit))
    Written.write(folder / "loadavg", f"0.1 0.1 0.1 1/{on_host} 4242\n")


def test_the_threads_of_a_user_are_counted(tmp_path: Path) -> None:
    user(tmp_path, limit=26)
    room = thread_room(7, 8, tmp_path)
    assert room is not None
    assert (room.left, room.limit) == (6, "its RLIMIT_NPROC limit of 26 threads for uid 1000")
    assert thread_room(7, 6, tmp_path) is None


@pytest.mark.parametrize("exempt", [{"uid": 0}, {"capabilities": CAP_SYS_RESOURCE}, {"on_host": 18}])
def test_who_is_exempt_or_far_from_it_is_not_held_back(tmp_path: Path, exempt: dict[str, int]) -> None:
    user(tmp_path, limit=26, **exempt)
    assert thread_room(7, 8, tmp_path) is None


def test_a_mask_of_capabilities_that_is_no_number_exempts_nobody(tmp_path: Path) -> None:
    user(tmp_path, limit=26)
    status = tmp_path / "7/status"
    status.write_text(status.read_text().replace("CapEff:\t0", "CapEff:\tp"))
    room = thread_room(7, 8, tmp_path)
    assert room is not None and room.left == 6


def test_a_pids_group_above_the_process_counts(tmp_path: Path) -> None:
    made = Written(tmp_path, version=2)
    made.group("jobs/one", {"pids.max": "max", "pids.current": 3})
    made.group("jobs", {"pids.max": 100, "pids.current": 96})
    found = thread_room(7, 8, made.proc)
    advice = "raise that limit (docker run --pids-limit, systemd TasksMax=, podPidsLimit)"
    assert found == Room(4, "pids.max (100) of the control group /jobs", advice, "threads")


def test_a_real_pids_group() -> None:
    with subjects.python() as pid, cgroups.real_group("pids", f"kineto-pids-{pid}") as group:
        group.add(pid)
        assert thread_room(pid, 8) is None
        group.write("pids.max", 3)
        room = thread_room(pid, 8)
        assert room is not None
        assert room.left == 2


@pytest.mark.parametrize(
    ("limit", "hard", "option"), [(8, 4096, "1024:"), (8, 64, "1024:1024"), (1024, "unlimited", "2048:")]
)
def test_advice_for_more_descriptors_is_within_the_hard_limit(
    tmp_path: Path, limit: int, hard: int | str, option: str
) -> None:
    Written.write(tmp_path / "7/limits", f"Limit\n{'Max open files':26}{limit:<21}{hard:<21}files\n")
    for number in (0, 1, 2, 4095):  # the last is left of a higher limit
        Written.write(tmp_path / f"7/fd/{number}", "")
    room = descriptor_room(7, 16, tmp_path)
    assert room is not None
    assert (room.left, room.limit) == (limit - 3 - (limit > 4095), f"its RLIMIT_NOFILE limit of {limit}")
    assert room.advice.endswith(f"`prlimit --pid 7 --nofile={option}`")


def test_mappings_are_counted_against_the_hosts_limit(tmp_path: Path) -> None:
    Written.write(tmp_path / "sys/vm/max_map_count", "65530\n")
    Written.write(tmp_path / "7/maps", "1000-2000 rw-p 0 00:00 0\n" * 65500)
    advice = "raise it, as root: `sysctl vm.max_map_count=131060`"
    assert mapping_room(7, 128, tmp_path) == Room(30, "the host's vm.max_map_count of 65530", advice, "mappings")
    Written.write(tmp_path / "7/maps", "")
    assert mapping_room(7, 128, tmp_path) is None
