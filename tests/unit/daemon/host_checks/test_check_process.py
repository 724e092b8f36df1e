"""Which processes are not taken for other profilers."""

import os
from pathlib import Path

from kinetod.host_checks.check_process import own_processes


def test_the_daemons_children_are_its_own(tmp_path: Path) -> None:
    for thread, children in (("7", "8 9 "), ("70", "10")):
        (tmp_path / "7/task" / thread).mkdir(parents=True)
        (tmp_path / "7/task" / thread / "children").write_text(children)
    assert own_processes(7, tmp_path) == {os.getpid(), 7, 8, 9, 10}


def test_a_kernel_that_lists_no_children_hides_nothing_else(tmp_path: Path) -> None:
    assert own_processes(7, tmp_path) == {os.getpid(), 7}
