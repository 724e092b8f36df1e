"""Finds in the agent's sources whatever gets code of ours called on threads of the program.

A registration is a call or an assignment that puts a function of ours in a place from which the program's threads (or
the interpreter, the C library or a vendor's library on them) call it.
"""

from __future__ import annotations  # the agent's tests run under 3.9

import ast
import re
from pathlib import Path
from typing import Iterator

import kineto_agent

PACKAGE = Path(kineto_agent.__file__).parent
NATIVE = PACKAGE.parent / "native"

# Calls by the last part of their names, with the positions of the functions that they register; keywords count, too.
_CALLS = {
    "MethodShadow": slice(2, None),
    "ModuleHook": slice(1, None),
    "ProfilerGuard": slice(0, None),
    "SessionGuard": slice(1, None),
    "register_at_fork": slice(0, None),
    "register": slice(0, 1),  # of atexit
    "insert": slice(1, 2),  # into sys.meta_path
    "ref": slice(1, None),  # of weakref
    "append": slice(0, 1),  # to what torch calls when it initialises CUDA
    "finalize": slice(1, 2),
    "installed": slice(1, None),  # OptimizerHook
    "addaudithook": slice(0, None),
    "setprofile": slice(0, None),
    "settrace": slice(0, None),
    "signal": slice(1, None),
    "CFUNCTYPE": slice(0, 0),
    "PYFUNCTYPE": slice(0, 0),
}
_ON = {
    "append": ("calls",),
    "register": ("atexit",),
    "insert": ("sys.meta_path",),
    "ref": ("weakref",),
    "signal": ("signal", "_signal"),
}
_VALUES = ("environ",)  # arguments that are no functions
_ATTRIBUTES_OF_OURS = ("last", "attribute", "key", "each")  # set on modules and classes that the agent has made
_HOOKS = ("excepthook", "displayhook", "unraisablehook", "breakpointhook", "exec_module", "__import__", "__del__")

# In C: what registers a function, wherever it is called, and names of such functions that are looked up.
_NATIVE = re.compile(
    r"(?<!\w)(pthread_atfork|atexit|__cxa_atexit|on_exit|sigaction|pthread_key_create|register_callbacks|subscribe|"
    r"set_callbacks|create_buffer|trace_by_callback|gate_place|call_site_redirect|(?<= )driver_slot|"
    r"(?<=torch[.>])add|(?<=torch->)add)\("
    r"(?!const struct)"
    r'|"(_Py\w*(?:AddPendingCall|SetProfile|SetTrace))"'
)
_DEFINITION = re.compile(r"^(?:extern |static )*(?:int|void|bool|const char \*|uint64_t) ?\w+\(", re.MULTILINE)
# Elsewhere: the gate through which Kineto's calls to CUPTI go, and what an attach makes a stopped thread run.
_OTHER_NATIVE = {
    "torch/kineto_gate.c: gate",
    "attach/methods/python_stub.c: attach",
    "attach/methods/collector_stub.c: attach",
}
_PUTS_BACK = {"theirs", "self._original", "self._originals[name]"}


def python_entries() -> set[str]:
    """`module: function` of each function in Python, as the source names it at its registration."""
    found: set[str] = {"__init__.py: %s" % name for name in kineto_agent.__all__ if name != "__version__"}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        registered = _registered(ast.parse(path.read_text()))
        found.update("%s: %s" % (name, function) for function in registered if function not in _PUTS_BACK)
    return found


def _registered(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr in _HOOKS:
                    yield ast.unparse(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in _HOOKS:
            yield node.name


def _of_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    owner, _, name = called.rpartition(".")
    if (
        name == "setattr"
        and ast.unparse(node.args[0]) != "made"
        and ast.unparse(node.args[1]) not in _ATTRIBUTES_OF_OURS
    ):
        yield ast.unparse(node.args[2])
    if name not in _CALLS or owner not in _ON.get(name, (owner,)):
        return
    for argument in [*node.args[_CALLS[name]], *(keyword.value for keyword in node.keywords)]:
        if ast.unparse(argument) not in _VALUES:
            yield ast.unparse(argument)


def native_entries() -> set[str]:
    """`file: registration` of each place in C that registers a function."""
    found = set(_OTHER_NATIVE)
    for path in sorted(NATIVE.rglob("*.c")):
        text = _DEFINITION.sub("", re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL))
        found.update("%s: %s" % (path.relative_to(NATIVE), match[1] or match[2]) for match in _NATIVE.finditer(text))
    return found


if __name__ == "__main__":
    print("\n".join([*sorted(python_entries()), "", *sorted(native_entries())]))
