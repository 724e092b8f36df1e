"""`kinetoctl plugin`: what is written can be installed, what kinetod would refuse is said, what it has is listed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.commands import plugin as plugin_commands
from kinetoctl.commands.plugin import check_plugin
from support.service.cli import Run, run_here
from support.service.daemon import IMPORT_PATH
from support.service.fake_profiler import FakeServer

FILES = ["README.md", "kinetod_npu/__init__.py", "kinetod_npu/source.py", "pyproject.toml", "tests/test_plugin.py"]


@pytest.fixture
def run(server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)  # of the process that loads
    return lambda *arguments: run_here(capsys, server.address, *arguments)


@pytest.fixture
def project(run: Run, tmp_path: Path) -> Path:
    assert run("plugin", "new", "npu", "--output-dir", str(tmp_path)).code == 0
    return tmp_path / "kinetod-npu"


def test_a_new_project_is_one_that_kinetod_takes(run: Run, tmp_path: Path) -> None:
    result = run("plugin", "new", "npu", "--output-dir", str(tmp_path), "-o", "json")
    folder = tmp_path / "kinetod-npu"
    assert result.json() == {"name": "npu", "path": str(folder), "files": FILES}
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == sorted(FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["kinetod-npu"]
    checked = run("plugin", "check", str(folder), "-o", "json").json()
    assert (checked["name"], checked["activity_types"]) == ("npu", ["npu_activity"])
    assert checked["signs"] == {"libraries": ["libnpu.so*"]}


def test_its_own_test_passes(project: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([IMPORT_PATH, str(project)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)]
    ran = subprocess.run(command, env=environ, cwd=project, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_nothing_that_exists_is_overwritten(run: Run, project: Path) -> None:
    (project / "README.md").write_text("mine")
    result = run("plugin", "new", "npu", "--output-dir", str(project.parent))
    assert (result.code, result.stdout) == (5, "")
    assert result.stderr == (
        f"error: the folder {project} already exists; nothing was written\n"
        "Give the plug-in another name, or choose another --output-dir. `kinetoctl plugin check FOLDER` shows\n"
        "whether kinetod would accept the plug-in in the existing folder.\n"
    )
    assert (project / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("../npu", 2, "cannot be the name of a plug-in; expected lower-case letters and digits"),
        ("Npu", 2, "cannot be the name of a plug-in"),
        ("cupti", 5, "name: cupti is the name of a source that every agent has; choose another"),
        ("x", 5, "name: 'x' must consist of 2 to 16 lower-case letters and digits"),
        (
            "gpu",
            5,
            "schema 'gpu': its name is reserved (docs/record-schemas.md lists the reserved names); choose another\n",
        ),
    ],
)
def test_names_that_no_plug_in_can_have_leave_nothing(
    run: Run, tmp_path: Path, name: str, code: int, text: str
) -> None:
    result = run("plugin", "new", name, "--output-dir", str(tmp_path))
    assert result.code == code
    assert text in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error(run: Run, tmp_path: Path) -> None:
    result = run("plugin", "new", "npu", "--output-dir", str(tmp_path / "none"))
    assert result.code == 5
    assert "kinetod-npu cannot be written: No such file or directory" in result.stderr


def test_what_kinetod_would_refuse_is_said_with_the_line(run: Run, project: Path) -> None:
    source = project / "kinetod_npu" / "source.py"
    source.write_text("import torch\n" + source.read_text())
    result = run("plugin", "check", str(project))
    assert (result.code, result.stdout) == (5, "")
    assert "agent_files['source.py']:1: it imports torch, but a traced process has only" in result.stderr
    refused = run("plugin", "check", str(project), "-o", "json")
    assert refused.code == 5
    assert refused.json()["refused"].startswith("agent_files['source.py']:1: it imports torch")


def test_files_that_others_could_change_are_a_note_until_it_is_installed(run: Run, project: Path) -> None:
    source = project / "kinetod_npu" / "source.py"
    source.chmod(0o666)
    result = run("plugin", "check", str(project))
    assert result.code == 0
    assert "note: if it were installed like this, kinetod would refuse it:" in result.stderr
    assert f"{source} can be changed by others (mode 0666)" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of another user that only this one trusts")
def test_a_project_of_a_user_is_for_a_kinetod_of_that_user(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"declaration": {"name": "npu", "signs": [[], [], [], []], "schema": {"types": {}}, "conflicts": [],
                              "needs_from_start": "", "detach": "full"}, "of_user": "it belongs to uid 7"}  # fmt: skip
    checked = plugin_commands._checked(answer, installed=True)
    assert checked.notes == [
        "only your own kinetod accepts it as it is; the host's kinetod would refuse it: it belongs to uid 7"
    ]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["/no/such/program"], "the process that loads it cannot be started: "),
        (["sh", "-c", "echo odd >&2; kill -9 $$"], "the process that loads it failed (exit status -9): odd"),
        (["sleep", "60"], "loading it did not finish within 0.2 s"),
    ],
)
def test_a_process_that_does_not_answer_is_an_answer(command: list[str], text: str) -> None:
    assert check_plugin("npu", command=command, deadline_s=0.2 if "sleep" in command else 30).refused.startswith(text)


def test_a_folder_without_a_plug_in_says_what_it_lacks(run: Run, tmp_path: Path) -> None:
    missing = run("plugin", "check", str(tmp_path)).stderr
    assert f"{tmp_path / 'pyproject.toml'} cannot be read: No such file or directory\n" in missing
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert "must declare exactly one plug-in: one line" in run("plugin", "check", str(tmp_path)).stderr


def test_the_daemons_plug_ins_are_listed(server: FakeServer, run: Run) -> None:
    assert run("plugin", "list").stderr == (
        "No plug-in is installed alongside the daemon. `kinetoctl plugin new NAME` writes one.\n"
    )
    server.profiler.host = pb.Host(
        plugins=[
            pb.Plugin(
                name="npu", package="kinetod-npu", version="1.2", state=pb.PLUGIN_STATE_ON, activity_types=["npu_a"]
            ),
            pb.Plugin(name="tin", package="kinetod-tin", version="0.1", state=pb.PLUGIN_STATE_OFF),
            pb.Plugin(name="tan", state=pb.PLUGIN_STATE_REFUSED, reason="it is broken"),
        ]
    )
    assert run("plugin", "list").stdout == (
        "NAME  STATE    VERSION  PACKAGE      ACTIVITY TYPES, OR WHY NOT\n"
        "npu   on       1.2      kinetod-npu  npu_a\n"
        "tin   off      0.1      kinetod-tin  not in plugins.sources of kinetod's configuration\n"
        "tan   refused  -        -            it is broken\n"
    )
    assert [plugin["state"] for plugin in run("plugin", "list", "-o", "json").json()] == [
        "PLUGIN_STATE_ON",
        "PLUGIN_STATE_OFF",
        "PLUGIN_STATE_REFUSED",
    ]
