"""`kinetoctl run`: the environment, and that nothing stays in between."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kinetoctl.commands import run
from kinetoctl.errors import CliError
from support.service.cli import environment, kinetoctl, run_process
from support.waiting import scaled

SHOW = "import os, sys; print(os.getpid(), os.environ['KINETO_AGENT'], sys.argv[1:])"


def test_the_agent_is_found_first_and_the_own_path_stays() -> None:
    changed = run.agent_environment(
        {"PYTHONPATH": "/mine", "HOME": "/h"}, agent_socket=Path("/s/agent.sock"), rocm_device=Path("/nowhere")
    )
    assert changed == {
        "HOME": "/h",
        "KINETO_AGENT": "1",
        "KINETO_AGENT_SOCKET": "/s/agent.sock",
        "PYTHONPATH": f"{run.inject_folder()}{os.pathsep}/mine",
    }


def test_an_empty_path_does_not_become_the_working_directory() -> None:
    changed = run.agent_environment({"PYTHONPATH": ""}, agent_socket=None)
    assert changed["PYTHONPATH"] == str(run.inject_folder())


def test_an_agent_that_is_switched_off_stays_off() -> None:
    changed = run.agent_environment({"KINETO_AGENT": "0"}, agent_socket=None, rocm_device=Path("/dev/null"))
    assert changed["KINETO_AGENT"] == "0"
    assert run.ROCM_VARIABLE not in changed


def rocm_variable(environ: dict[str, str]) -> str:
    changed = run.agent_environment(environ, agent_socket=None, rocm_device=Path("/dev/null"))
    return changed[run.ROCM_VARIABLE]


def test_with_an_amd_gpu_rocprofiler_is_told_of_the_agents_client() -> None:
    library = run.inject_folder().parents[1] / "_native" / "libkineto_rocprofiler.so"
    assert rocm_variable({}) == f"{library}:"  # without the colon at the end a list loses its last entry
    assert rocm_variable({"ROCP_TOOL_LIBRARIES": "/other.so"}) == f"/other.so:{library}:"
    assert rocm_variable({"ROCP_TOOL_LIBRARIES": f"{library}:/other.so:"}) == f"/other.so:{library}:"


def test_without_an_amd_gpu_rocprofiler_is_told_nothing(tmp_path: Path) -> None:
    changed = run.agent_environment({}, agent_socket=None, rocm_device=tmp_path / "kfd")
    assert run.ROCM_VARIABLE not in changed


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("from kinetoctl.commands.run import inject_folder; inject_folder()", "kineto_agent"),
        ("from kinetoctl.__main__ import main; main(['-q', 'run', '--', 'no-such'])", "grpc"),
        ("from kinetoctl.__main__ import main; main(['-q', 'run', '--', 'no-such'])", "rich"),
    ],
    ids=["to find the agent", "to run", "to run"],
)
def test_what_is_not_needed_is_not_imported(code: str, module: str) -> None:
    program = f"import sys; {code}; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"False\n"


def test_the_command_has_the_pid_and_the_options_that_were_typed(tmp_path: Path) -> None:
    arguments = kinetoctl(
        "run", "--agent-socket", str(tmp_path / "a.sock"), sys.executable, "-c", SHOW, "--quiet", "-x"
    )
    with subprocess.Popen(
        arguments, env=environment(), stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    ) as child:
        stdout, _ = child.communicate(timeout=scaled(30))
    assert stdout == f"{child.pid} 1 ['--quiet', '-x']\n"


def test_the_exit_code_is_the_commands_own() -> None:
    assert run_process(["run", "--", "sh", "-c", "exit 42"], environment()).code == 42


def test_no_daemon_yet_is_a_note_that_quiet_leaves_out(tmp_path: Path) -> None:
    arguments = ["run", "--agent-socket", str(tmp_path / "a.sock"), "--", "true"]
    assert run_process(arguments, environment()).stderr == (
        f"note: no daemon at {tmp_path}/a.sock yet; the agent connects once `kinetod` has started\n"
    )
    assert run_process(["--quiet", *arguments], environment()).stderr == ""


def test_a_command_that_does_not_exist_is_code_127() -> None:
    result = run_process(["-q", "run", "--", "no-such-command"], environment())
    assert result.code == 127
    assert result.stderr.splitlines() == [
        "error: no-such-command: no such command",
        "Check the spelling, or give the path; `command -v NAME` shows where the shell finds a command.",
    ]


def test_a_command_that_cannot_be_executed_is_code_126(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("text")
    result = run_process(["-q", "run", "--", f"{tmp_path}/plain.txt"], environment())
    assert result.code == 126
    first, *advice = result.stderr.splitlines()
    assert first == f"error: {tmp_path}/plain.txt: cannot be executed: Permission denied"
    assert advice[0].startswith("Check with `ls -l` that the file is executable (`chmod +x` makes it so)")


def test_a_missing_agent_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "AGENT_PACKAGE", "no_such_package")
    with pytest.raises(CliError, match=r"the package no_such_package is not installed alongside kinetoctl: .*install"):
        run.inject_folder()
