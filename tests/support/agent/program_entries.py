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
    "finalize": slice(1, 2),
    "installed": slice(1, None),  # OptimizerHook
    "addaudithook": slice(0, None),
    "setprofile": slice(0, None),
    "settrace": slice(0, None),
    "signal": slice(1, None),
    "CFUNCTYPE": slice(0, 0),
    "PYFUNCTYPE": slice(0, 0),
}
_ON = {"register": ("atexit",), "insert": ("sys.meta_path",), "ref": ("weakref",), "signal": ("signal", "_signal")}
_HOOKS = ("excepthook", "displayhook", "unraisablehook", "breakpointhook", "exec_module", "__import__", "__del__")

# In C: what registers a function, wherever it is called.
_NATIVE = re.compile(
    r"\b(pthread_atfork|atexit|__cxa_atexit|on_exit|signal|sigaction|pthread_key_create)\(([^;]*)\);"
    r"|_(?:Py|PyEval)_?(AddPendingCall|SetProfile|SetTrace)\b"
    r"|(addGlobalCallback|addThreadLocalCallback|ActivityRegisterCallbacks|EnableCallback|cuptiSubscribe)\w*"
)


def python_entries() -> set[str]:
    """`module: function` of each function in Python, as the source names it at its registration."""
    found: set[str] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        found.update("%s: %s" % (name, function) for function in _registered(ast.parse(path.read_text())))
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
    if name == "setattr" and ast.unparse(node.args[0]) not in ("self", "made", "package", "found", "above"):
        yield ast.unparse(node.args[2])
    if name not in _CALLS or owner not in _ON.get(name, (owner,)):
        return
    for argument in [*node.args[_CALLS[name]], *(keyword.value for keyword in node.keywords)]:
        yield ast.unparse(argument)


def native_entries() -> set[str]:
    """`file: registration` of each place in C that registers a function."""
    found = set()
    for path in sorted(NATIVE.rglob("*.c")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for match in _NATIVE.finditer(text):
            function, arguments, python, vendor = match.groups()
            registered = function + "(%s)" % " ".join(arguments.split()) if function else python or vendor
            found.add("%s: %s" % (path.relative_to(NATIVE), registered))
    return found


if __name__ == "__main__":
    print("\n".join([*sorted(python_entries()), "", *sorted(native_entries())]))
