"""The locks that the image and the packages are installed from."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from pinned.pins import BUILD, FOLDER, RUNTIME, LockError, normal, read
from support.peers.kubernetes import ROOT

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_DEPLOYED = {"cupti", "dev", "docs", "fuzz", "notebook", "perfetto", "polars"}  # no image and no package has them
EXTRAS = {
    name: lines for name, lines in PROJECT["project"]["optional-dependencies"].items() if name not in NOT_DEPLOYED
}
DIGEST = "0" * 64


def unmet(lines: list[str], lock: Path) -> list[str]:
    """The requirements that a lock does not satisfy."""
    pins = read(lock)
    wanted = [Requirement(line) for line in lines]
    return [
        str(each)
        for each in wanted
        if normal(each.name) not in pins or pins[normal(each.name)].version not in each.specifier
    ]


@pytest.mark.parametrize("lines", [PROJECT["project"]["dependencies"], *EXTRAS.values()], ids=["kinetod", *EXTRAS])
def test_the_lock_satisfies_the_project(lines: list[str]) -> None:
    assert unmet(lines, RUNTIME) == []


def test_the_tools_lock_satisfies_the_build_backend_and_the_list_of_tools() -> None:
    tools = [line for line in (FOLDER / "build.in").read_text().splitlines() if not line.startswith("#")]
    assert unmet([*PROJECT["build-system"]["requires"], *tools], BUILD) == []


def test_every_extra_that_is_deployed_is_locked_by_make_lock() -> None:
    (extras,) = re.findall(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extras.split() == list(EXTRAS)


@pytest.mark.parametrize("lock", [RUNTIME, BUILD], ids=lambda path: path.stem)
def test_each_package_has_one_version_hashes_and_no_address(lock: Path) -> None:
    assert [pin.name for pin in read(lock).values() if not pin.digests] == []
    assert re.findall(r"\w+://|--(?:extra-)?index-url|--find-links|^-", lock.read_text(), re.MULTILINE) == []


@pytest.mark.parametrize("line", ["six>=1", "six", "-e .", "six @ https://example.com/six.whl", "--index-url x"])
def test_what_is_no_pin_is_refused(tmp_path: Path, line: str) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(f"click==8.5.1 \\\n    --hash=sha256:{DIGEST}\n{line}\n")
    with pytest.raises(LockError, match=r"lock\.txt:3: neither a pinned package"):
        read(lock)


@pytest.mark.parametrize("path", ["deploy/container/Dockerfile", "deploy/packages/build.sh"])
def test_the_image_and_the_packages_are_installed_by_the_one_script_and_by_no_pip_of_their_own(path: str) -> None:
    text = (ROOT / path).read_text()
    assert "deploy/supply/install.sh" in text
    assert re.findall(r"\bpip\b.* install|--with-pip|ensurepip -", text) == []
    assert "share/sbom/kinetod.cdx.json" in text


def wheel(folder: Path, name: str) -> str:
    """Makes a wheel without contents; its SHA-256."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("wrong", ["build", "requirements"])
def test_a_file_with_another_hash_is_not_installed(tmp_path: Path, wrong: str) -> None:
    pinned = tmp_path / "deploy/supply"
    pinned.mkdir(parents=True)
    shutil.copy(FOLDER / "install.sh", pinned)
    for lock in ("build", "requirements"):
        digest = wheel(tmp_path, lock)
        (pinned / f"{lock}.txt").write_text(f"{lock}==1.0 --hash=sha256:{DIGEST if lock == wrong else digest}\n")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    done = subprocess.run(
        [str(pinned / "install.sh"), sys.executable, str(environment), "", str(tmp_path / "sbom.json")],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert f"{wrong}==1.0" in done.stderr
