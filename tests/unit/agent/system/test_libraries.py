"""Libraries are opened, and searched, without the GIL."""

import ast
import ctypes
import os
from pathlib import Path
from typing import Iterator

import kineto_agent
import pytest
from kineto_agent.system import c_functions
from kineto_agent.system.libraries import Library, PyLibrary, interpreter
from support.agent.python_child import run_python

AGENT = Path(kineto_agent.__file__).parent
WITH_GIL = {"CDLL", "PyDLL", "pythonapi", "in_dll", "dlopen", "dlsym"}
_BY_ITSELF = "system/c_functions.py"  # asks once for the addresses where no live attach has brought them


def uses(path: Path) -> Iterator[str]:
    """What in a module of the agent calls the loader with the GIL held. Annotations and base classes do not."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for part in (node.func, *node.args):
                if isinstance(part, ast.Attribute) and part.attr in WITH_GIL:
                    yield part.attr
        if isinstance(node, ast.Attribute) and node.attr == "pythonapi":
            yield node.attr


def test_no_module_calls_the_loader_with_the_gil_held() -> None:
    found = {path.relative_to(AGENT).as_posix(): sorted(uses(path)) for path in AGENT.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {_BY_ITSELF: ["dlopen", "dlsym"]}


def test_functions_are_those_of_ctypes() -> None:
    library = Library(None)
    assert (library.abs(-3), library.abs.__name__) == (3, "abs")
    assert library.address("abs") == ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value
    with pytest.raises(AttributeError, match="there is no symbol kineto_nothing"):
        _ = library.kineto_nothing


def test_a_library_that_cannot_be_opened_is_told_in_the_loaders_words() -> None:
    with pytest.raises(OSError, match=r"/nowhere/libnothing\.so: cannot open shared object file"):
        Library("/nowhere/libnothing.so")
    with pytest.raises(OSError):
        Library("libnothing.so", mode=os.RTLD_NOLOAD)
    assert c_functions._opening == []


FORKED = """
import ctypes, os
from kineto_agent.system import c_functions
state = ctypes.c_int.from_address(ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(None), "_r_debug")) + 24)
state.value = 1  # RT_ADD: what is there while a thread opens a library
child = os.fork()
if not child:
    ctypes.CDLL(None)  # the loader ended it: "Inconsistency detected by ld.so"
    os._exit(7)
print(os.WEXITSTATUS(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_while_a_library_is_opened_can_open_others() -> None:
    done = run_python(["-c", FORKED])
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_what_was_half_open_at_the_fork_is_not_used() -> None:
    c_functions._opening.append((os.getppid(), "libc.so.6"))
    try:
        with pytest.raises(OSError, match="partly loaded: this process was forked"):
            Library("libc.so.6")
    finally:
        c_functions._opening.clear()


def test_functions_of_python_keep_the_gil_and_raise() -> None:
    size = interpreter().PyObject_Size
    size.argtypes, size.restype = (ctypes.py_object,), ctypes.c_ssize_t
    assert size([1, 2]) == 2
    with pytest.raises(TypeError):
        size(1)
    assert isinstance(interpreter(), PyLibrary)
