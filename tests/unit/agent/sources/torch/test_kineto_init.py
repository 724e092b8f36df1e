"""Nothing that our sessions of torch's profiler do appears on the program's standard output or error."""

import json
from pathlib import Path
from typing import Dict

import pytest
from support.agent.python_child import environment
from support.targets import torch_forks

pytestmark = pytest.mark.torch
SILENT = {"stderr": "", "stdout": ""}
ROUNDS = """
import ctypes
model = Model()
for _ in range(2):
    recording = Recording(stack_trace=True, record_shapes=True)
    for _ in range(20):
        model.step()
    outcome, data = recording.stop()
    assert data.count(b'"name": "step"') == 20 and not outcome.warnings, outcome
level = ctypes.c_int.in_dll(libtorch_symbols.library(), "_ZN9libkineto6Logger14severityLevel_E").value
Path(sys.argv[2]).write_text(json.dumps(level))
"""


def spoken(plan: str, tmp_path: Path, **variables: str) -> Dict[str, str]:
    found = torch_forks.run(
        "-m",
        "support.agent.torch_session",
        plan,
        str(tmp_path / "level"),
        env=environment(TMPDIR=str(tmp_path), **variables),
    )
    assert found.returncode == 0, found.stderr
    return {"stderr": found.stderr, "stdout": found.stdout}


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, 4),
        pytest.param({"KINETO_LOG_LEVEL": ""}, 4, marks=pytest.mark.slow),
        pytest.param({"KINETO_LOG_LEVEL": "0"}, 0, marks=pytest.mark.slow),
        ({"KINETO_LOG_LEVEL": "2"}, 2),
    ],
)
def test_the_first_use_of_kineto_is_silent_and_leaves_the_log_level_that_torch_sets(
    variables: Dict[str, str], level: int, tmp_path: Path
) -> None:
    assert spoken(ROUNDS, tmp_path, **variables) == SILENT
    assert json.loads((tmp_path / "level").read_text()) == level


def test_the_programs_own_profiler_is_whole_after_kineto_was_started_by_us(tmp_path: Path) -> None:
    plan = """
import torch
model = Model()
Recording().stop()
with torch.profiler.profile() as profile:
    for _ in range(10):
        model.step()
assert sum(event.name == "step" for event in profile.events()) == 10
"""
    assert "External init callback" not in spoken(plan, tmp_path)["stderr"]


def test_a_torch_that_cannot_be_started_silently_is_refused(tmp_path: Path) -> None:
    plan = """
from kineto_agent.sources.torch import kineto_init
from kineto_agent.sources.interface import SourceError
kineto_init._REGISTER_CLIENT = "missing"
try:
    Recording()
except SourceError as error:
    assert (error.reason_code, "standard error" in error.reason) == ("TORCH_PROFILER_UNAVAILABLE", True)
else:
    raise AssertionError
"""
    assert spoken(plan, tmp_path) == SILENT
