import os
import re
import resource
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from kineto_trace.base.own_processes import ProcessPool, python, safe_environment, tied_python
from kineto_trace.base.quantities import free_memory

ROOT = Path(__file__).parents[4]
PRODUCT = ("agent/kineto_agent", "cli/kinetoctl", "daemon/kinetod", "daemon/kineto_trace", "protos/kineto_protos")
HERE = "daemon/kineto_trace/base/own_processes.py"


def test_nothing_else_starts_an_interpreter() -> None:
    ways = re.compile(r"sys\.executable,|^\s*(?:import|from) multiprocessing|ProcessPoolExecutor", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if ways.search(path.read_text())
    }
    # the agent names the interpreter in a message, and imports nothing of ours that is not the agent's
    assert found == {HERE, "agent/kineto_agent/__main__.py"}


def test_what_may_be_taken_over_has_variables_without_credentials_alone() -> None:
    kept = {"PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": "/code"}
    others = {"AWS_SECRET_ACCESS_KEY": "a", "HTTPS_PROXY": "http://user:b@c", "KINETOD_TLS_KEY": "d", "PASSPATH": "e"}
    assert safe_environment({**kept, **others}) == kept


def test_a_tied_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import signal\nprint('ready', flush=True)\nsignal.pause()\n")
    program = "import subprocess; from kineto_trace.base.own_processes import tied_python as tied; "
    program += "subprocess.Popen(tied('endless')); input()"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environ, **pipes) as parent:  # type: ignore[call-overload]
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == b""  # nobody has the pipe any more


def test_one_whose_parent_has_ended_does_not_begin() -> None:
    command = [*tied_python("this")]
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


def test_calls_are_answered_by_other_processes() -> None:
    with ProcessPool(2) as pool:
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
        assert pool.submit(os.getpid).result() != os.getpid()
        assert pool.submit(int, "11", base=2).result() == 3


def test_the_processes_of_a_pool_share_the_free_memory() -> None:
    with ProcessPool(1) as alone, ProcessPool(4) as pool:
        one, part = (
            each.submit(resource.getrlimit, resource.RLIMIT_DATA).result()[0] - free_memory() / count
            for each, count in ((alone, 1), (pool, 4))
        )
        assert abs(one) < free_memory() / 4 and abs(part) < free_memory() / 4


def test_an_error_travels_and_the_process_goes_on() -> None:
    with ProcessPool(1) as pool:
        before = pool.submit(os.getpid).result()
        with pytest.raises(ValueError, match="invalid literal"):
            pool.submit(int, "x").result()
        assert pool.submit(os.getpid).result() == before


def test_an_answer_that_cannot_travel_is_an_error() -> None:
    with ProcessPool(1) as pool, pytest.raises(TypeError, match="cannot pickle"):
        pool.submit(open, os.devnull).result()


def test_a_process_that_dies_takes_its_call_alone() -> None:
    with ProcessPool(1) as pool:
        before, fatal, after = pool.submit(len, "one"), pool.submit(os._exit, 9), pool.submit(len, "three")
        assert isinstance(fatal.exception(), BrokenProcessPool)
        assert [before.result(), after.result()] == [3, 5]


def test_what_a_call_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessPool(1) as pool:
        assert pool.submit(print, "said").result() is None
        assert pool.submit(os.read, 0, 1).result() == b""  # nor does it read the calls
    assert capfd.readouterr().out == ""


def test_a_process_ends_with_its_pipe() -> None:
    done = subprocess.run(python("kineto_trace.base.own_processes", "1"), input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_pool_leaves_no_process_and_no_descriptor() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    with ProcessPool(2) as pool:
        pids = {call.result() for call in [pool.submit(os.getpid) for _ in range(8)]}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert descriptors() == before


def test_the_command_leaves_the_working_directory_out() -> None:
    assert python("kinetod", "--version") == (sys.executable, "-P", "-m", "kinetod", "--version")
