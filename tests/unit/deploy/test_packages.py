"""The scripts of the packages, as dpkg runs them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[3]
PACKAGES = ROOT / "deploy/packages"


@pytest.mark.parametrize(
    ("lines", "removed"),
    [
        (
            ["kineto:x:990:990::/:/usr/sbin/nologin", "kineto-attach:x:5991:5991::/:/bin/false"],
            ["kineto", "kineto-attach"],
        ),
        (
            ["kineto:x:1000:1000:Ki Neto:/home/kineto:/bin/bash", "kineto-attach:x:991:991::/:/bin/sh"],
            ["kineto-attach"],
        ),
        (["kineto:x:0:0::/:/usr/sbin/nologin", "kinetos:x:992:992::/:/usr/sbin/nologin"], []),
        (["kineto:x:1000:1000::/home/kineto:"], []),
    ],
)
def test_a_purge_removes_kinetods_users_and_no_account_of_that_name(
    tmp_path: Path, lines: list[str], removed: list[str]
) -> None:
    (tmp_path / "passwd").write_text("".join(f"{line}\n" for line in ("root:x:0:0::/root:/bin/sh", *lines)))
    (tmp_path / "state").mkdir()
    (tmp_path / "precious").write_text("x")
    (tmp_path / "configuration").symlink_to(tmp_path)
    (tmp_path / "userdel").write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/removed\n')
    (tmp_path / "userdel").chmod(0o755)
    script = (PACKAGES / "postrm").read_text()
    for path, here in (("/etc/passwd", "passwd"), ("/var/lib/kineto", "state"), ("/etc/kinetod", "configuration"),
                       ("/run/systemd/system", "none")):  # fmt: skip
        assert path in script
        script = script.replace(path, str(tmp_path / here))
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-c", script, "postrm", "purge"], env=environ, check=True)
    found = tmp_path / "removed"
    assert (found.read_text().split() if found.exists() else []) == removed
    assert (tmp_path / "precious").exists() and not (tmp_path / "state").exists()


@pytest.mark.parametrize("script", ["postinst", "prerm", "kinetod.spec.in"])
def test_the_scripts_programs_are_isolated_from_the_environment(script: str) -> None:
    lines = [line for line in (PACKAGES / script).read_text().splitlines() if "/opt/kinetod/bin/" in line]
    assert lines and all("/opt/kinetod/bin/python3 -I -m kinetoctl host " in line for line in lines)


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
def test_they_are_shell_scripts(script: str) -> None:
    assert shutil.which("sh") and subprocess.run(["sh", "-n", str(PACKAGES / script)], check=False).returncode == 0


def test_of_compiled_libraries_only_those_are_packed_that_the_build_makes_anew() -> None:
    made = set(re.findall(r"libkineto_\w+\.so", (ROOT / "agent/native/build_hook.py").read_text()))
    packed = [
        tomllib.loads((ROOT / name).read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["artifacts"]
        for name in ("pyproject.toml", "agent/pyproject.toml")
    ]
    assert {Path(path).name for path in packed[0]} == made
    assert packed[1] == [path.removeprefix("agent/") for path in packed[0] if path.startswith("agent/")]
