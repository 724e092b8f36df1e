"""An interpreter that was built without an extension module."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agent.python_child import environment
from support.service.cli import run_process
from support.service.daemon import Daemon

pytestmark = pytest.mark.slow


@pytest.fixture
def without_ctypes(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program of a copy of this Python that has everything but _ctypes."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = Path(sysconfig.get_path("stdlib"))
    copy = tmp_path / "lib" / version
    (copy / "lib-dynload").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    python = shutil.copy(os.path.realpath(sys.executable), tmp_path / "bin" / version)
    for folder, wanted in ((library, copy), (library / "lib-dynload", copy / "lib-dynload")):
        for each in folder.iterdir():
            if each.name != "lib-dynload" and not each.name.startswith("_ctypes."):
                (wanted / each.name).symlink_to(each)
    program = "try:\n import _ctypes\nexcept ImportError:\n print('without', flush=True)\nwhile True: pass"
    process = subprocess.Popen(
        [python, "-c", program], stdout=subprocess.PIPE, env=environment(PYTHONHOME=str(tmp_path))
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"without\n":
            pytest.skip("this Python has _ctypes inside itself")
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_python_without_ctypes_is_refused_and_told_what_it_lacks(
    daemon: Daemon, without_ctypes: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    command = ["trace", "--pid", str(without_ctypes.pid), "--duration", "100ms"]
    result = run_process(command, daemon.client_environ(), tmp_path)
    assert result.code != 0
    assert "standard library: no _ctypes" in result.stderr
    assert "built without libffi" in result.stderr
    assert without_ctypes.poll() is None
