"""`kinetoctl demo`, as a new user runs it."""

import gzip
import json
import os
import re
from pathlib import Path

import psutil
import pytest
from support.losses import without_losses
from support.service.cli import environment, run_process
from support.waiting import until


def demo_environment(tmp_path: Path) -> dict[str, str]:
    """Without torch, whose import alone takes seconds: a folder in front hides it."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    environ = environment()
    return {**environ, "PYTHONPATH": os.pathsep.join([str(hidden), environ["PYTHONPATH"]])}


@pytest.mark.slow
def test_the_demo_ends_with_a_trace_and_leaves_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ["demo", "--duration", "2s", "--output-dir", str(output)]
    result = run_process(arguments, demo_environment(tmp_path))
    assert result.code == 0, result
    (path,) = output.iterdir()
    with gzip.open(path, "rt") as stream:
        document = json.load(stream)
    names = {event["name"] for event in document["traceEvents"] if event.get("cat") == "python_function"}
    work = ("load_batch", "forward", "backward")  # where the cores are busy not all of them have samples
    assert any("demo_target.py" in name and name.endswith(work) for name in names)
    assert "SHA-256 verified" in result.stdout
    assert "json.load reads it back:" in result.stderr
    warned = [line.strip() for line in result.stdout.splitlines() if "warning" in line]
    assert without_losses(line.removeprefix("warning").strip() for line in warned) == []
    assert f"[5/5] kinetoctl report {path}" in result.stderr
    assert re.search(r"^(A step takes|\d+ % of the recorded time|.* That could save)", result.stdout, re.MULTILINE)
    assert re.search(r"^FUNCTION +LINE .*\n.*demo_target.py", result.stdout, re.MULTILINE)
    assert f"kinetoctl open {path}" in result.stderr

    def left() -> list[str]:
        found = (str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"]))
        return [command for command in found if "kineto-demo-" in command]

    until(lambda: not left(), "no process is left", state=left)
