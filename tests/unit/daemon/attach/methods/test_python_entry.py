"""What becomes of source that was handed over, read from the page that it was given."""

import importlib.util
import os
import shutil
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Bootstrap, Deadline
from kinetod.attach.channel import bootstrap
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods import python_entry
from kinetod.attach.methods.native_thread import NativeThread
from kinetod.attach.methods.pending_call import PendingCall
from kinetod.attach.methods.python_code import CODE
from kinetod.attach_helper.attempt import Method
from support.machine import native
from support.targets.engine_target import engine_target, needs_ptrace, pythons, version_of
from support.targets.python_versions import other_versions_slow
from support.waiting import until

pytestmark = needs_ptrace
MACHINE = os.uname().machine
GENERATOR = native.ROOT / "daemon" / "native" / "generate_stub_code.py"
every_python = pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
every_method = pytest.mark.parametrize("make", [PendingCall, NativeThread])


def hand_over(method: Method, pid: int, source: str) -> None:
    method.hand_over(TargetImage(pid), Bootstrap(time.time_ns(), source.encode()), Deadline(10))


def generator() -> ModuleType:
    """The development tool as a module."""
    spec = importlib.util.spec_from_file_location("generate_stub_code", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(method: Method) -> AttachError:
    until(lambda: method.problem() is not None, "it is told")
    found = method.problem()
    assert found is not None
    return found


@every_python
@every_method
def test_an_exception_is_told_and_nothing_is_printed(tmp_path: Path, executable: str, make: type[Method]) -> None:
    method = make()
    with engine_target(tmp_path, "malloc", executable) as target:
        hand_over(method, target.pid, "raise LookupError('here')")
        found = problem(method)
        assert (found.code, "LookupError('here')" in found.reason) == (AttachCode.UNSUITABLE, True)
        target.finish()  # which looks at standard error


@every_method
@pytest.mark.parametrize(
    ("look", "code", "said"),
    [
        ("p.stat(f+'/x')", AttachCode.UNSUPPORTED, "cannot find its standard library"),
        # Which nobody may write, root either: what a program that changes its user all the time may meet.
        ("p.open('/proc/sys/kernel/random/uuid',1)", AttachCode.UNSUITABLE, "was not allowed to read /"),
        # A file that cannot be opened although it could be looked at, a moment ago.
        ("own(X.spec_from_file_location('_x',f))", AttachCode.UNSUPPORTED, "cannot find its standard"),
    ],
    ids=["gone", "denied", "unopened"],
)
def test_a_standard_library_that_cannot_be_read_is_told_as_that(
    tmp_path: Path, make: type[Method], look: str, code: AttachCode, said: str
) -> None:
    method = make()
    with engine_target(tmp_path, "malloc") as target:
        source = bootstrap.make(time.time_ns()).source.decode()
        for module in ("_ctypes", "_socket"):
            source = source.replace(f"ext('{module}')", "ext('_x')")
        hand_over(method, target.pid, source.replace("p.stat(f)", look))
        found = problem(method)
        assert found.code is code
        assert said in found.reason
        assert "_x" in found.reason
        target.finish()


@every_python
def test_a_program_that_imports_a_module_opened_for_us_does_not_initialise_it_again(
    tmp_path: Path, executable: str
) -> None:
    """A second initialisation would change what the C code of the first one refers to, except from Python 3.13 on."""
    before, opened, _rest = bootstrap.make(2).source.decode().partition("T,N=ext('_ctypes')")
    assert opened
    same = "(T.ArgumentError is __import__('_ctypes').ArgumentError)is(y.version_info<(3,13))"
    method = PendingCall()
    with engine_target(tmp_path, "malloc", executable) as target:
        hand_over(method, target.pid, f"{before}T=ext('_ctypes');raise LookupError('same',{same})\nboot(2)")
        assert "LookupError('same', True)" in problem(method).reason
        target.finish()


def test_the_code_compiled_here_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None or shutil.which("objcopy") is None:
        pytest.skip("needs gcc and binutils")
    module = generator()
    monkeypatch.setattr(python_entry, "CODE", {MACHINE: module.compile_stub(module.PYTHON, MACHINE)})
    monkeypatch.setattr(python_entry, "OPENING_CODE", {MACHINE: module.compile_stub(module.OPENING, MACHINE)})
    with engine_target(tmp_path, "malloc") as target:
        PendingCall().hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(10))
        target.until_marked()
        target.finish()


@pytest.mark.parametrize("machine", CODE)
def test_the_code_fits_into_what_libraries_leave_free(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_entry, "this_machine", lambda: SimpleNamespace(name=machine))
    for code in python_entry.codes()[: python_entry.CODES_NEEDED]:
        assert code[-1] != 0  # zeros would look unused
        assert len(code) <= 1600


@every_method
def test_an_exit_is_no_exit(tmp_path: Path, make: type[Method]) -> None:
    method = make()
    with engine_target(tmp_path, "malloc") as target:
        hand_over(method, target.pid, "raise SystemExit(3)")
        assert "SystemExit(3)" in problem(method).reason
        target.finish()


@every_python
def test_the_source_runs_on_a_new_thread_with_globals_of_its_own(tmp_path: Path, executable: str) -> None:
    source = (
        "posix, thread = modules['posix'], modules['_thread']\n"
        "assert thread.get_native_id() != posix.getpid()\n"
        "given = {'__builtins__', 'dlopen', 'dlsym', 'modules', 'native', 'syscall', 'turns'}\n"
        "assert given == set(globals()) - {'given', 'posix', 'thread'}, sorted(globals())\n"
        f"posix.write(posix.open({str(tmp_path / 'mark')!r}, posix.O_WRONLY), b'x')\n"
    )
    method = PendingCall()
    with engine_target(tmp_path, "malloc", executable) as target:
        hand_over(method, target.pid, source)
        target.until_marked()
        target.finish()


@pytest.mark.slow
def test_what_is_cancelled_before_it_begins_does_nothing(tmp_path: Path) -> None:
    method = PendingCall()
    with engine_target(tmp_path, "asleep bystander") as target:  # its main thread does not run them
        hand_over(method, target.pid, f"open({str(target.mark)!r}, 'w').write('x')")
        method.finish()
        other = PendingCall()
        hand_over(other, target.pid, f"open({str(target.mark)!r}, 'a').write('y')")
        target.until_marked()
        target.finish()
        assert target.mark.read_text() == "y"
