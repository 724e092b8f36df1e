"""How an agent gets into an interpreter. The children tell by their output, or by saying Hello."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List

import pytest
from support.agent.agent_daemon import Daemon
from support.agent.python_child import AGENT_ROOT, INJECT, Child, environment, run_python

OLD_PYTHONS = [path for path in (shutil.which("python2.7"), shutil.which("python3.8")) if path]
REPORT = """
import os, sys, threading
print(__name__, __file__, sys.argv, sys.path[0])
tasks = os.listdir("/proc/self/task")
print(sys.modules["__main__"].__dict__ is globals(), [t.name for t in threading.enumerate()], len(tasks) > 1)
class Local: pass
"""
MORE_THREADS = "True ['MainThread'] True"  # which `threading` does not show


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(str(tmp_path / "agent.sock")) as daemon:
        yield daemon


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "train.py"
    path.parent.mkdir()
    path.write_text(REPORT)
    return path


def agent_command(*arguments: str) -> List[str]:
    return ["-m", "kineto_agent", *arguments]


# ---------------------------------------------------------------- python -m kineto_agent


def test_a_script_runs_as_python_would_run_it(script: Path) -> None:
    done = run_python(agent_command(str(script), "--lr", "1"))
    assert done.stdout.splitlines() == [
        "__main__ %s ['%s', '--lr', '1'] %s" % (script, script, script.parent),
        MORE_THREADS,
    ]
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_module_runs_as_python_would_run_it(script: Path) -> None:
    done = run_python(agent_command("-m", "train", "x"), cwd=script.parent)
    assert done.stdout.splitlines() == [
        "__main__ %s ['%s', 'x'] %s" % (script, script, script.parent),
        MORE_THREADS,
    ]


def test_code_runs_as_python_would_run_it() -> None:
    done = run_python(agent_command("-c", "import sys; print(__name__, sys.argv, repr(sys.path[0]))", "x", "y"))
    assert done.stdout == "__main__ ['-c', 'x', 'y'] ''\n"


def test_a_folder_and_an_archive_run_their_main(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import sys, beside; print(__name__, beside.x, sys.argv[1:])")
    (tmp_path / "app" / "beside.py").write_text("x = 5")
    shutil.make_archive(str(tmp_path / "app"), "zip", str(tmp_path / "app"))
    for name in ("app", "app.zip"):
        done = run_python(agent_command(str(tmp_path / name), "a"))
        assert (done.stdout, done.stderr) == ("__main__ 5 ['a']\n", "")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("1/0", 1),
        ("import os; os._exit(9)", 9),
        ("def f(:", 1),
        ("raise SystemExit", 0),
    ],
)
def test_the_exit_status_is_the_programs(tmp_path: Path, code: str, status: int) -> None:
    (tmp_path / "x.py").write_text(code)
    assert run_python([str(tmp_path / "x.py")]).returncode == status
    assert run_python(agent_command(str(tmp_path / "x.py"))).returncode == status


def test_spawned_children_find_the_programs_names(tmp_path: Path) -> None:
    path = tmp_path / "spawn.py"
    path.write_text(
        "import multiprocessing as mp\n"
        "class Thing: pass\n"
        "def work(queue): queue.put(Thing())\n"
        "if __name__ == '__main__':\n"
        "    context = mp.get_context('spawn'); queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,)); child.start()\n"
        "    print(type(queue.get(timeout=20)) is Thing); child.join()\n"
    )
    done = run_python(agent_command(str(path)))
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_script_that_is_not_there_is_pythons_own_error(tmp_path: Path) -> None:
    done = run_python(agent_command(str(tmp_path / "none.py")))
    assert done.returncode == 2
    assert done.stderr == "%s: can't open file '%s': [Errno 2] No such file or directory\n" % (
        sys.executable,
        tmp_path / "none.py",
    )


@pytest.mark.parametrize("arguments", [[], ["-m"], ["-c"]])
def test_wrong_usage_says_the_right_one(arguments: List[str]) -> None:
    done = run_python(agent_command(*arguments))
    assert done.returncode == 2
    assert done.stderr == "usage: python -m kineto_agent (SCRIPT | -m MODULE | -c CODE) [ARGS...]\n"


def test_kineto_agent_0_runs_the_program_without_an_agent(script: Path) -> None:
    done = run_python(agent_command(str(script)), env=environment(KINETO_AGENT="0"))
    assert done.stdout.splitlines()[1] == "True ['MainThread'] False"


# ---------------------------------------------------------------- the .pth hook


def pth_line() -> str:
    return (AGENT_ROOT / "kineto_agent.pth").read_text()


@pytest.mark.parametrize(
    ("variables", "more_threads"),
    [({"KINETO_AGENT": "1"}, "True"), ({"KINETO_AGENT": "0"}, "False"), ({"KINETO_AGENT": ""}, "False"), ({}, "False")],
)
def test_the_pth_line_starts_the_agent_if_wanted(variables: Dict[str, str], more_threads: str) -> None:
    code = pth_line() + "import os; print(len(os.listdir('/proc/self/task')) > 1)"
    done = run_python(["-c", code], environment(**variables))
    assert (done.stdout, done.stderr) == (more_threads + "\n", "")


def test_the_pth_hook_imports_nothing_unless_wanted() -> None:
    done = run_python(["-c", pth_line() + "import sys; print('kineto_agent' in sys.modules)"])
    assert done.stdout == "False\n"


@pytest.mark.parametrize("option", ["-E", "-I"])
def test_the_pth_hook_reads_no_variable_where_the_interpreter_reads_none(option: str) -> None:
    code = "import sys; sys.path.insert(0, %r)\n" % str(AGENT_ROOT)
    code += pth_line() + "print('kineto_agent' in sys.modules, len(os.listdir('/proc/self/task')))"
    done = run_python([option, "-c", code], environment(KINETO_AGENT="1"))
    assert (done.stdout, done.stderr) == ("False 1\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("become", ["os.setresuid(0, 64123, 0)", "os.setresgid(0, 64123, 0)"])
def test_a_program_with_rights_that_its_caller_lacks_gets_no_agent_and_no_log(tmp_path: Path, become: str) -> None:
    log = tmp_path / "agent.log"
    tmp_path.chmod(0o777)
    code = "import os, kineto_agent.bootstrap.lifecycle; from kineto_agent.system.debuglog import log\n"
    code += "%s; kineto_agent.start(); log('said'); print(len(os.listdir('/proc/self/task')))" % become
    done = run_python(["-c", code], environment(KINETO_AGENT_LOG=str(log)))
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert not log.exists()


def test_a_broken_agent_does_not_break_the_start(tmp_path: Path) -> None:
    shutil.copytree(str(AGENT_ROOT / "kineto_agent"), str(tmp_path / "kineto_agent"))
    (tmp_path / "kineto_agent" / "control" / "runner.py").write_text("raise MemoryError('broken')")
    env = environment(KINETO_AGENT="1", PYTHONPATH=str(tmp_path))
    done = run_python(["-c", pth_line() + "print('alive')"], env)
    assert (done.stdout, done.stderr) == ("alive\n", "")


# ---------------------------------------------------------------- kinetoctl run


def injected(**variables: str) -> Dict[str, str]:
    return environment(**{"PYTHONPATH": str(INJECT), **variables})


def test_any_interpreter_gets_the_agent_by_its_path(daemon: Daemon) -> None:
    child = Child(["-c", "input()"], injected(KINETO_AGENT_SOCKET=daemon.path))
    _connection, hello = daemon.welcome()
    assert hello.pid == child.process.pid
    child.kill()


def test_the_folder_is_off_the_path_and_its_neighbours_were_never_on_it() -> None:
    code = (
        "import sys, kineto_agent.protocol.wire; print([p for p in sys.path if 'kineto_agent' in p]);"
        "print(%r in sys.path, 'sitecustomize' in sys.modules)" % str(AGENT_ROOT)
    )
    done = run_python(["-S", "-c", "import sitecustomize\n" + code], injected(), cwd=Path("/"))
    assert (done.stdout, done.stderr) == ("[]\nFalse True\n", "")


def test_children_get_the_agent_too() -> None:
    code = (
        "import subprocess, sys; code = 'import os; print(len(os.listdir(\\'/proc/self/task\\')) > 1)';"
        "subprocess.run([sys.executable, '-c', code])"
    )
    assert run_python(["-c", code], injected()).stdout == "True\n"


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; print('mine', __name__, os.path.dirname(__file__))")
    env = injected(PYTHONPATH=os.pathsep.join([str(INJECT), str(tmp_path)]))
    code = "import sys, sitecustomize; print(sitecustomize.__file__)"
    done = run_python(["-c", code], env)
    assert done.stdout == "mine sitecustomize %s\n%s\n" % (tmp_path, tmp_path / "sitecustomize.py")
    assert done.stderr == ""


def test_an_error_in_the_users_sitecustomize_is_shown_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import not_there_at_all")
    plain = run_python(["-c", "print(5)"], environment(PYTHONPATH=str(tmp_path)))
    env = injected(PYTHONPATH=os.pathsep.join([str(INJECT), str(tmp_path)]))
    ours = run_python(["-c", "print(5)"], env)
    assert ours.stdout == plain.stdout == "5\n"
    assert "not_there_at_all" in ours.stderr
    assert ("not_there_at_all" in plain.stderr) == ("not_there_at_all" in ours.stderr)


def test_kineto_agent_0_wins_over_the_injection() -> None:
    done = run_python(["-c", "import os; print(len(os.listdir('/proc/self/task')))"], injected(KINETO_AGENT="0"))
    assert done.stdout == "1\n"


@pytest.mark.skipif(not OLD_PYTHONS, reason="no Python older than the agent's floor here")
def test_older_pythons_run_without_an_agent_and_without_a_word() -> None:
    for executable in OLD_PYTHONS:
        env = injected()
        if subprocess.run([executable, "--version"], capture_output=True, check=False).returncode:
            continue  # a shim without its interpreter
        done = run_python(["-c", "import sys; print('kineto_agent' in sys.modules)"], env, executable=executable)
        assert (done.stdout, done.stderr) == ("False\n", ""), executable
