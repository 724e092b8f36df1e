import os
import subprocess
import sys
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inspect.target_image import Mapping, TargetImage, _modules
from support.service import subjects
from support.targets.engine_target import PYENV, engine_target, pythons, version_of
from support.targets.python_versions import other_versions_slow
from support.waiting import until


@pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
def test_the_interpreter_and_its_version_are_found(tmp_path: Path, executable: str) -> None:
    command = [executable, "-c", "import sys; print(*sys.version_info[:2])"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    with engine_target(tmp_path, executable=executable) as target:
        python = TargetImage(target.pid).python
    assert python is not None
    assert python.version[:2] == tuple(map(int, said))
    assert "python" in python.path


def test_a_program_without_python_has_none() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            until(lambda: subjects.state(process.pid) == "S", "it sleeps: it is loaded")
            image = TargetImage(process.pid)
            assert image.exe.endswith(("sleep", "coreutils"))
            assert image.python is None
            assert image.libc_symbol("pthread_create") > 0
        finally:
            process.kill()


@pytest.mark.skipif(not (PYENV / "3.8.18").exists(), reason="no Python 3.8 on this machine")
def test_an_old_interpreter_is_refused(tmp_path: Path) -> None:
    with engine_target(tmp_path, executable=str(PYENV / "3.8.18" / "bin" / "python")) as target:
        with pytest.raises(AttachError, match=r"runs Python 3\.8; the agent needs 3\.9 or later") as failure:
            TargetImage(target.pid)
        assert failure.value.code is AttachCode.UNSUPPORTED


def test_a_process_that_ended_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(AttachError) as failure:
        TargetImage(process.pid)
    assert failure.value.code is AttachCode.GONE


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become someone else")
def test_another_users_process_is_not_permitted() -> None:
    script = """
import os, sys
sys.path[:0] = sys.argv[2:]
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.attach_types import AttachError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    TargetImage(int(sys.argv[1]))
except AttachError as error:
    print(error.code, error)
"""
    command = [sys.executable, "-c", script, str(os.getpid()), *sys.path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("ATTACH_NOT_PERMITTED the kernel does not permit")
    assert "CAP_SYS_PTRACE" in said


def test_every_address_of_a_mapping_leads_to_it() -> None:
    image = TargetImage(os.getpid())
    for mapping in image.maps[:-1]:
        assert image.mapping_at(mapping.start) == mapping
        assert image.mapping_at(mapping.end - 1) == mapping
    assert image.mapping_at(0x1000) is None


def test_a_file_that_is_only_read_is_no_module() -> None:
    image = TargetImage(os.getpid())
    image.maps = [
        Mapping(0x1000, 0x2000, "r--p", 0, "/lib/a.so"),
        Mapping(0x5000, 0x6000, "r--p", 0, "/lib/a.so"),
        Mapping(0x6000, 0x7000, "r-xp", 0x1000, "/lib/a.so"),
    ]
    assert _modules(image.maps) == {"/lib/a.so": 0x5000}
