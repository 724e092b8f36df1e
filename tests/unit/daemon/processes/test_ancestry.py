import os
import subprocess
import sys
from pathlib import Path

from kinetod.processes.ancestry import Family, with_descendants
from kinetod.processes.identity import ProcessKey


def put(proc: Path, pid: int, parent: int, ticks: int) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b (c) S {parent} {' '.join(['0'] * 17)} {ticks} 0 0\n")


def test_ancestors_go_up_to_the_first_process(tmp_path: Path) -> None:
    for pid, parent in ((1, 0), (20, 1), (30, 20), (40, 30)):
        put(tmp_path, pid, parent, pid)
    family = Family(tmp_path)
    assert family.ancestors(40) == (30, 20, 1)
    assert family.ancestors(1) == ()
    assert family.ancestors(99) == ()


def test_a_parent_that_started_later_is_another_process(tmp_path: Path) -> None:
    for pid, parent, ticks in ((1, 0, 1), (20, 1, 900), (30, 20, 300)):
        put(tmp_path, pid, parent, ticks)
    assert Family(tmp_path).ancestors(30) == ()
    assert with_descendants({20}, tmp_path) == {20}
    assert with_descendants({1}, tmp_path) == {1, 20}


def test_what_was_read_while_pids_changed_hands_ends(tmp_path: Path) -> None:
    put(tmp_path, 20, 30, 5)
    put(tmp_path, 30, 20, 5)
    assert Family(tmp_path).ancestors(20) == (30,)


def test_very_long_lines_are_followed_for_some_generations() -> None:
    family = Family()
    for pid in range(2, 5000):
        family.add(ProcessKey(pid, pid), pid - 1)
    assert family.ancestors(4999) == tuple(range(4998, 4898, -1))


def test_what_is_known_is_not_read(tmp_path: Path) -> None:
    family = Family(tmp_path)
    family.add(ProcessKey(40, 9), 30)
    family.add(ProcessKey(30, 8), 20)
    assert family.ancestors(40) == (30,)


def test_descendants_are_found_in_other_sessions_too() -> None:
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}], start_new_session=True)"
    program = "import os; print(os.getpid(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", grandchild.format(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        grandchild_pid = int(child.stdout.readline())
        found = with_descendants({child.pid})
        child.stdin.close()
    assert found == {child.pid, grandchild_pid}
    assert os.getpid() not in found
