"""Why execution traces are refused: torch's observer kills programs. If one lives here, torch may have been mended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import scaled

pytestmark = [pytest.mark.slow, pytest.mark.torch]

OBSERVE = """
import sys
import threading
import torch
from torch.profiler import ExecutionTraceObserver, record_function
torch.set_num_threads(1)
weights = torch.ones(4, 4, requires_grad=True)
def observer():
    made = ExecutionTraceObserver()
    made.register_callback(sys.argv[1])
    made.start()
    return made
"""
BACKWARD_OF_ANOTHER_THREAD = """
losses = []
forward = threading.Thread(target=lambda: losses.append((weights @ weights).sum()))
forward.start()
forward.join()
running = observer()
losses[0].backward()
"""
ANNOTATION_FROM_AN_EARLIER_TRACE = """
earlier = observer()
annotation = record_function("epoch")
annotation.__enter__()
earlier.stop()
earlier.unregister_callback()
running = observer()
annotation.__exit__(None, None, None)
for _ in range(300):
    weights @ weights
"""


@pytest.mark.parametrize("program", [BACKWARD_OF_ANOTHER_THREAD, ANNOTATION_FROM_AN_EARLIER_TRACE])
def test_an_execution_trace_that_begins_between_two_operators_kills_the_program(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OBSERVE + program, str(tmp_path / "trace.json")]
    # torch takes what lies beside its stack for a pointer; fresh memory is none then, by no chance.
    environ = {**os.environ, "MALLOC_PERTURB_": "165", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    ended = subprocess.run(command, env=environ, capture_output=True, timeout=scaled(100), check=False)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr.decode()
