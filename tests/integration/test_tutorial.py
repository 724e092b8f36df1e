"""The tutorial's program, its change and its commands, on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.service.cli import Result, run_process
from support.service.daemon import running_daemon
from support.waiting import scaled_option, until

TUTORIAL = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
LOOP = r"train\.py:(1[0-3]|2\d)\b"  # lines of __getitem__ and of the training loop


def test_the_lines_that_the_tutorial_names_are_those_of_its_program() -> None:
    program, old, _new = blocks()
    assert program.splitlines()[11] == old
    assert "line 12 of `train.py`" in TUTORIAL


def blocks() -> tuple[str, str, str]:
    """The program, the line that is changed, and what it becomes."""
    program, change = (re.findall(rf"```{kind}\n(.*?)```", TUTORIAL, re.DOTALL)[0] for kind in ("python", "diff"))
    old, new = (line[1:] for line in change.splitlines())
    return program, old, new


@pytest.mark.slow
def test_the_slow_line_is_named_and_its_change_is_called_faster(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program, old, new = blocks()
    with running_daemon() as daemon:

        def kinetoctl(*arguments: str) -> Result:
            return run_process(arguments, daemon.client_environ(), tmp_path)

        def traced(code: str, folder: str) -> str:
            (tmp_path / "train.py").write_text(code)
            # On a busy machine, threads of torch that wait for each other would take more time than the slow line.
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            with subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, env=environ) as process:
                pid = str(process.pid)
                try:
                    until(lambda: re.search(LOOP, kinetoctl("stacks", pid).stdout), "it trains", 60, pause_s=0.5)
                    arguments = ["--duration", scaled_option(3), "--report", "--output-dir", folder]
                    result = kinetoctl("trace", pid, *arguments)
                finally:
                    process.kill()
            assert result.code == 0, result
            return result.stdout

        assert "Images.__getitem__" in traced(program, "before")
        traced(program.replace(old, new), "after")
        found = kinetoctl("diff", "before", "after")
    assert re.match(r"(typical )?step time: .*: faster$", found.stdout.splitlines()[0]), found
