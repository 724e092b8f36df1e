"""The declaration of a plug-in: the value of an entry point of the group "kineto.sources". No I/O.

Only kinetod reads it, never a traced process: docs/plugins.md explains how to write one.
"""

import ast
import re
import sys
from typing import Any, FrozenSet, Iterator, Mapping, NamedTuple

from kineto_agent.protocol.plugin_bundle import (
    DETACH_FULL,
    DETACHES,
    PLUGIN_API,
    SOURCE_FILE,
    Signs,
)
from kineto_agent.protocol.schema import Schema, to_json
from kineto_agent.protocol.wire import PLUGIN_INTERFACE

from kinetod.config.value_kinds import PLUGIN_NAME

__all__ = ["Accelerator", "Signs", "check", "may_import", "to_plain"]

GROUP = "kineto.sources"  # of entry points
# Profilers of the program that a plug-in may have to yield to.
PROFILERS = ("torch", "jax")
# Names of built-in sources, which plug-ins cannot use.
BUILT_IN = frozenset(("cupti", "graphs", "jax", "memory", "pjrt", "pti", "rocm", "rocprofiler", "steps", "xpu"))
AGENT_PYTHON = (3, 9)  # the oldest Python that an agent runs on
MAX_PATTERNS, MAX_PATTERN = 16, 200  # of each member of Signs; characters of one
MAX_PYTHON_BYTES = 256 << 10  # of one file
MAX_LIBRARY_BYTES = 4 << 20
MAX_FILES = 16

_PYTHON_FILE = re.compile(r"[a-z_][a-z0-9_]{0,39}\.py")
_LIBRARY = re.compile(r"lib[A-Za-z0-9_.+-]{1,59}\.so")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}(=.*)?")


class Accelerator(NamedTuple):
    """A plug-in.

    name               of the entry point, of the schema and of the source: "npu"
    signs              what shows that a process uses the accelerator
    agent_files        name -> content: "source.py", which has SOURCE (sources/interface.py) and runs in the traced
                       process; further Python files, which it imports with `from . import NAME`; and lib….so, which it
                       opens with `api.load_library`
    schema             activity types and records
    conflicts          members of PROFILERS that take precedence: recording stops when one of them starts
    needs_from_start   a variable that the process must have been started with, as "NAME" or "NAME=pattern"; ""
    detach             what stop() leaves behind. "full": nothing. "idle": the vendor's library stays attached, which
                       costs the program next to nothing. "never": it continues recording; such types are recorded only
                       on request
    interface_version  of this declaration
    """

    name: str
    signs: Signs
    agent_files: Mapping[str, bytes]
    schema: Schema
    conflicts: FrozenSet[str] = frozenset()
    needs_from_start: str = ""
    detach: str = DETACH_FULL
    interface_version: int = PLUGIN_INTERFACE


def check(value: Any) -> Accelerator:
    """Returns an entry point's value if agents can use the plug-in. Raises ValueError, which says what is wrong.

    The interface version is checked first: a plug-in of a later version may have another form.
    """
    version = getattr(value, "interface_version", None)
    if version != PLUGIN_INTERFACE:
        raise ValueError(
            "interface_version is %.40r, but this kinetod supports version %d; install matching releases"
            % (version, PLUGIN_INTERFACE)
        )
    if not isinstance(value, Accelerator):
        raise ValueError("it is a %s, not a kinetod.plugins.accelerator.Accelerator" % type(value).__name__)
    for problem in _problems(value):
        raise ValueError(problem)
    value.schema.check()
    return value


def to_plain(accelerator: Accelerator) -> Mapping[str, Any]:
    """Everything but its files, as JSON values."""
    return {
        "name": accelerator.name,
        "signs": [list(patterns) for patterns in accelerator.signs],
        "schema": to_json(accelerator.schema),
        "conflicts": sorted(accelerator.conflicts),
        "needs_from_start": accelerator.needs_from_start,
        "detach": accelerator.detach,
    }


def _problems(value: Accelerator) -> Iterator[str]:
    if not isinstance(value.name, str) or not PLUGIN_NAME.fullmatch(value.name):
        yield "name: %.40r must consist of 2 to 16 lower-case letters and digits" % (value.name,)
    if value.name in BUILT_IN:
        yield "name: %s is the name of a source that every agent has; choose another" % value.name
    if not isinstance(value.schema, Schema):
        yield "schema: it is a %s, not a kineto_agent.protocol.schema.Schema" % type(value.schema).__name__
    if value.schema.name != value.name:
        yield "schema.name: %.40r differs from the plug-in's name %r" % (value.schema.name, value.name)
    for problem in _sign_problems(value.signs):
        yield "signs" + problem
    if not isinstance(value.conflicts, frozenset) or not value.conflicts <= frozenset(PROFILERS):
        yield "conflicts: %.80r must be a frozenset with only these names: %s" % (value.conflicts, ", ".join(PROFILERS))
    needs = value.needs_from_start
    if not isinstance(needs, str) or not (needs == "" or (_VARIABLE.fullmatch(needs) and len(needs) <= MAX_PATTERN)):
        yield "needs_from_start: %.80r must be an environment variable, as NAME or NAME=pattern" % (needs,)
    if value.detach not in DETACHES:
        yield "detach: %.40r is not one of %s" % (value.detach, ", ".join(DETACHES))
    for problem in _file_problems(value.agent_files):
        yield "agent_files" + problem


def _sign_problems(signs: Signs) -> Iterator[str]:
    if not isinstance(signs, Signs):
        yield ": it is a %s, not a kinetod.plugins.accelerator.Signs" % type(signs).__name__
        return
    for name, patterns in signs._asdict().items():
        if not isinstance(patterns, tuple) or len(patterns) > MAX_PATTERNS:
            yield ".%s: it must be a tuple of at most %d patterns" % (name, MAX_PATTERNS)
            return
        for pattern in patterns:
            if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN or "\0" in pattern:
                yield ".%s: %.80r must be a string of 1 to %d characters" % (name, pattern, MAX_PATTERN)
    for path in signs.device_files:
        if not path.startswith("/") or set("*?[") & set(path.rpartition("/")[0]):
            yield ".device_files: %.80r must be an absolute path, with wildcards only in its last part" % path
    for pattern in signs.environment:
        if not _VARIABLE.fullmatch(pattern):
            yield ".environment: %.80r must be an environment variable, as NAME or NAME=pattern" % pattern
    if not any(signs):
        yield ": without any, the plug-in would run in every process; name a library, device file, variable or module"


def _file_problems(files: Any) -> Iterator[str]:
    if not isinstance(files, Mapping) or not 1 <= len(files) <= MAX_FILES:
        yield ": it must be a mapping of 1 to %d files" % MAX_FILES
        return
    if SOURCE_FILE not in files:
        yield ": %r, which must define SOURCE, is missing" % SOURCE_FILE
    for name, content in files.items():
        place = "[%.60r]" % (name,)
        is_python = isinstance(name, str) and _PYTHON_FILE.fullmatch(name)
        if not is_python and not (isinstance(name, str) and _LIBRARY.fullmatch(name)):
            yield place + ": a file must be called NAME.py (in lower case) or libNAME.so"
            return
        if not isinstance(content, bytes):
            yield place + ": its content is a %s, not bytes" % type(content).__name__
            return
        limit = MAX_PYTHON_BYTES if is_python else MAX_LIBRARY_BYTES
        if len(content) > limit:
            yield place + ": it has %d bytes, but at most %d can be sent to agents" % (len(content), limit)
        for problem in _python_problems(content, files) if is_python else ():
            yield place + problem


def _python_problems(content: bytes, files: Mapping[str, bytes]) -> Iterator[str]:
    """Yields the reasons why a file fails in every process, as far as they show without running it."""
    try:
        tree = ast.parse(content.decode(), feature_version=AGENT_PYTHON)
    except (SyntaxError, ValueError, RecursionError) as exc:
        yield ": it is not valid Python %d.%d: %s" % (*AGENT_PYTHON, exc)
        return
    for node in ast.walk(tree):
        for name in _imported(node):
            if name.startswith("."):
                if name[1:] + ".py" not in files:
                    yield ":%d: it imports %s, but there is no file %s.py" % (_line(node), name, name[1:])
            elif not may_import(name):
                yield ":%d: it imports %s, but a traced process has only the standard library and %s" % (
                    _line(node), name, " and ".join(PLUGIN_API),
                )  # fmt: skip


def may_import(name: str) -> bool:
    """Whether a plug-in's Python file may import this module; the same rule as in sources/plugins/guarded_source.py."""
    if name.partition(".")[0] == "kineto_agent":
        return name in PLUGIN_API
    return name.partition(".")[0] in sys.stdlib_module_names


def _imported(node: ast.AST) -> Iterator[str]:
    """The modules that a statement imports; ".NAME" for another file of the plug-in."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom) and node.level:
        yield from ("." + name for name in ([node.module] if node.module else [alias.name for alias in node.names]))
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module


def _line(node: Any) -> int:
    return int(node.lineno)
