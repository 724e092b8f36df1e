"""DCGM's own command: a program of that name with dcgmi's output (DCGM 3 and 4)."""

from pathlib import Path

import pytest
from kinetod.profilers.dcgm import Profiling, profiling
from support.waiting import scaled

LIST = """\
+-----------+--------------------+--------------------------------------------------+
| List Modules                                                                      |
| Status: Success                                                                   |
+===========+====================+==================================================+
| Module ID | Name               | State                                            |
+-----------+--------------------+--------------------------------------------------+
| 0         | Core               | Loaded                                           |
| 1         | NvSwitch           | Loaded                                           |
| 7         | Diag               | Not loaded                                       |
| 8         | Profiling          | {state}                                     |
| 9         | SysMon             | Not loaded                                       |
+-----------+--------------------+--------------------------------------------------+
"""


def dcgmi(folder: Path, script: str) -> tuple[str]:
    path = folder / "dcgmi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("Loaded", Profiling.LOADED),
        ("Not loaded", Profiling.NOT_LOADED),
        ("Denylisted", Profiling.NOT_LOADED),
        ("Paused", Profiling.NOT_LOADED),
    ],
)
def test_the_state_of_the_module_is_told(tmp_path: Path, state: str, expected: Profiling) -> None:
    (tmp_path / "said").write_text(LIST.format(state=state))
    command = dcgmi(tmp_path, f'[ "$*" = "modules --list" ] && cat {tmp_path}/said')
    assert profiling(command, deadline_s=scaled(20)) == (expected, "")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo 'Error: unable to establish a connection to the specified host: localhost' >&2; exit 1",
            "unable to est",
        ),
        ("exit 3", "says: nothing"),
        ("echo '| 8 | Other | Loaded |'", "Other"),
    ],
)
def test_an_answer_without_it_is_unknown_with_the_reason(tmp_path: Path, script: str, why: str) -> None:
    state, text = profiling(dcgmi(tmp_path, script), deadline_s=scaled(20))
    assert state is Profiling.UNKNOWN
    assert why in text


def test_a_command_that_hangs_or_is_not_there_is_unknown(tmp_path: Path) -> None:
    assert profiling(dcgmi(tmp_path, "exec sleep 60"), deadline_s=0.1)[0] is Profiling.UNKNOWN
    state, text = profiling((str(tmp_path / "none"),))
    assert (state, "is not installed" in text) == (Profiling.UNKNOWN, True)
