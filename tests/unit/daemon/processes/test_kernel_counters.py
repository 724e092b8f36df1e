"""What the kernel counts for a process is read as it is; what cannot be read is unknown, never 0."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from kinetod.processes.cgroups import V1, V2
from kinetod.processes.kernel_counters import UNKNOWN, CounterReader, ThreadEvents, ThreadTimes
from support.machine.cgroups import Written
from support.service import subjects

STAT = "7 (a) b) S 1 7 7 0 -1 4194304 {minor} 0 {major} 0 10 20 0 0 20 0 2 0 100 0 0\n"
STATUS = "Name:\t{name}\nNSpid:\t{tid}\t{inner}\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t6\n"
IO = "rchar: 100\nwchar: 200\nsyscr: 1\nsyscw: 2\nread_bytes: 300\nwrite_bytes: 400\ncancelled_write_bytes: 0\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A process 7 with two threads, which it calls 1 and 2 itself."""
    made = Written(tmp_path, version=V1).proc
    (made / "stat").write_text("cpu  100 1 10 900 5 2 3 4 0 0\ncpu0 0\n")
    (made / "7/stat").write_text(STAT.format(minor=50, major=3))
    (made / "7/io").write_text(IO)
    for tid, inner, name, times in ((7, 1, "python", "1000 200 30"), (8, 2, "loader", "5 6 7")):
        task = made / f"7/task/{tid}"
        task.mkdir(parents=True)
        (task / "schedstat").write_text(times + "\n")
        (task / "status").write_text(STATUS.format(name=name, tid=tid, inner=inner))
        (task / "stat").write_text(STAT.format(minor=tid, major=1))
    return made


def test_threads_have_the_numbers_and_names_that_the_process_itself_sees(proc: Path) -> None:
    reader = CounterReader(7, proc)
    assert reader.threads() == {1: ThreadTimes(1000, 200, 30), 2: ThreadTimes(5, 6, 7)}
    assert reader.thread_events() == {1: ThreadEvents(5, 6, 7, 1), 2: ThreadEvents(5, 6, 8, 1)}
    assert reader.names == {1: "python", 2: "loader"}
    reader.close()


def test_a_process_is_counted_as_a_whole(proc: Path) -> None:
    found = CounterReader(7, proc).process()
    assert (found.minor_faults, found.major_faults) == (50, 3)
    assert (found.read_bytes, found.written_bytes, found.read_chars, found.written_chars) == (300, 400, 100, 200)
    assert found.host_busy_ns == 120 * 10**9 // os.sysconf("SC_CLK_TCK")


def test_io_that_may_not_be_read_is_unknown(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = CounterReader(7, proc)
    read = reader._folder.read

    def refused(name: str) -> bytes:
        if name == "io":
            raise PermissionError(13, "refused")
        return read(name)

    monkeypatch.setattr("kinetod.processes.identity.ProcessFolder.read", lambda _self, name: refused(name))
    assert reader.process().read_bytes == UNKNOWN


def test_what_a_process_reads_that_has_become_another_users_is_unknown(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = CounterReader(7, proc)
    monkeypatch.setattr("kinetod.processes.identity.ProcessFolder.owner", lambda _self, _name: 0xFFFE)
    found = reader.process()
    assert (found.read_bytes, found.read_chars, found.minor_faults) == (UNKNOWN, UNKNOWN, 50)


def test_a_process_that_has_ended_and_is_not_reaped_is_gone(proc: Path) -> None:
    reader = CounterReader(7, proc)
    (proc / "7/stat").write_text(STAT.format(minor=50, major=3).replace(" S ", " Z "))
    with pytest.raises(ProcessLookupError):
        reader.process()


def test_a_process_that_has_got_the_number_of_a_child_is_no_child(proc: Path) -> None:
    (proc / "7/task/7/children").write_text("20 21 ")
    for pid, parent in ((20, 7), (21, 1)):
        (proc / f"{pid}/task/{pid}").mkdir(parents=True)
        (proc / f"{pid}/task/{pid}/schedstat").write_text("1 2 3\n")
        (proc / f"{pid}/io").write_text(IO)
        (proc / f"{pid}/stat").write_text(STAT.format(minor=0, major=4).replace(" S 1 ", f" S {parent} "))
    reader = CounterReader(7, proc)
    assert {pid: child.wait_ns for pid, child in reader.children().items()} == {20: 2}
    assert list(reader.child_names) == [20]


def test_of_very_many_threads_the_first_ones_are_read(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinetod.processes.kernel_counters.MAX_THREADS", 1)
    reader = CounterReader(7, proc)
    assert (len(reader.threads()), len(reader.thread_events()), reader.left_out) == (1, 1, True)


def test_a_thread_that_has_just_ended_is_left_out(proc: Path) -> None:
    (proc / "7/task/8/schedstat").unlink()
    assert list(CounterReader(7, proc).threads()) == [1]


@pytest.mark.parametrize(
    ("version", "limited", "stat"),
    [
        (V2, {"cpu.max": "150000 100000"}, "nr_periods 10\nnr_throttled 4\nthrottled_usec 7"),
        (V1, {"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 100000},
         "nr_periods 10\nnr_throttled 4\nthrottled_time 7000"),
    ],
)  # fmt: skip
def test_the_quota_of_the_control_group_and_its_throttling_are_read(
    tmp_path: Path, version: int, limited: dict[str, object], stat: str
) -> None:
    made = Written(tmp_path, version=version)
    made.group("jobs", {**limited, "cpu.stat": stat})
    made.group("jobs/one", {"cpu.max": "max 100000", "cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000})
    (made.proc / "7/stat").write_text(STAT.format(minor=0, major=0))
    (made.proc / "7/io").write_text(IO)
    reader = CounterReader(7, made.proc)
    limits, found = reader.limits(), reader.process()
    assert (limits.quota_cores, limits.quota_group) == (1.5, "/jobs")
    assert (found.quota_periods, found.throttled_periods, found.throttled_ns) == (10, 4, 7000)


def test_real_children_are_found_with_their_cpu_time() -> None:
    with subjects.python() as pid:
        found = CounterReader(os.getpid())
        assert found.children()[pid].cpu_ns > 0
        assert found.child_names[pid].startswith("python")


def test_neighbours_of_the_same_user_have_names() -> None:
    with subjects.python() as pid, subjects.python() as other:
        reader = CounterReader(pid)
        found = reader.neighbours()
        assert found[other] > 0
        assert pid not in found
        assert reader.neighbour_name(other).startswith("python")
        reader.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to start a process of another user")
def test_neighbours_of_another_user_or_with_pids_of_their_own_have_no_names() -> None:
    stranger = subprocess.Popen([subjects.SLEEP, "600"], user=65534)
    with stranger, subjects.python() as pid, subjects.python(prefix=("unshare", "--pid", "--fork")) as outer:
        reader = CounterReader(pid)
        inner = int(Path(f"/proc/{outer}/task/{outer}/children").read_text())
        assert [reader.neighbour_name(other) for other in (stranger.pid, inner)] == ["", ""]
        assert reader.neighbour_name(outer) == "unshare"
        reader.close()
        os.kill(inner, signal.SIGKILL)
        stranger.kill()


def test_a_real_process_that_computes_gets_cpu_time() -> None:
    with subjects.python() as pid:
        reader = CounterReader(pid)
        times = reader.threads()[pid]
        assert 0 < times.cpu_ns <= reader.process().cpu_ns
        assert reader.limits().usable_cores == len(os.sched_getaffinity(pid))
