"""PTI's use of a launch that another thread has finished and freed: versions that do it are refused, others do not.

The fake driver keeps threads from going on after a launch, so that others find it ended; what is freed is fenced off.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
from support.machine.kernel import allowed_to_trace
from support.service.daemon import Daemon
from support.xpu import level_zero
from support.xpu.level_zero_program import SECOND_NS, STOPPED, capture, counts, running

EVERYTHING = ("kernel", "gpu_memcpy", "gpu_memset", "xpu_driver", "xpu_sync", "overhead")
HOLD_US = "200"
UNSAFE = "0.12.4"

pytestmark = pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")


def fenced() -> dict[str, Any]:
    """Variables of the program."""
    return {"LD_PRELOAD": str(level_zero.fence()), "FAKE_LEVEL_ZERO_HOLD_US": HOLD_US}


@pytest.mark.parametrize("version", level_zero.RECORDED)
def test_no_launch_is_used_after_another_thread_has_freed_it(version: str, daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required(version), tmp_path, **fenced()) as program:
        found = capture(daemon, program.pid, EVERYTHING, during=lambda: program.tell("steps 20 10 3"))
        assert found.verdict == STOPPED
        rows = counts(found.trace)
        assert rows.pop("overhead") > 0
        assert rows == {"kernel": 600, "gpu_memcpy": 120, "gpu_memset": 60, "cuda_driver": 780, "cuda_sync": 780}
        assert program.end() == (0, "")


def test_a_version_that_uses_freed_launches_ends_a_program_that_uses_it(tmp_path: Path) -> None:
    installed = level_zero.required(UNSAFE)
    mapped = ["--torch", "--map", str(installed.libpti_view)]
    with running(installed, tmp_path, *mapped, **fenced()) as program:
        program.tell("kineto begin")
        with pytest.raises(AssertionError, match=f"ended with {-signal.SIGSEGV}"):
            program.tell("steps 20 10 3")


def test_a_version_that_uses_freed_launches_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required(UNSAFE), tmp_path, **fenced()) as program:
        found = capture(daemon, program.pid, ["kernel"], duration_ns=SECOND_NS)
        assert found.verdict == ("FAILED", "PTI_UNSAFE")
        assert "is PTI version 0.12.4, and versions before 0.14 corrupt the memory of programs" in found.target.reason
        program.tell("steps 20 10 3")
        assert not program.is_traced()
        assert program.end() == (0, "")
