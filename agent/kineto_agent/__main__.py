"""`python -m kineto_agent SCRIPT|-m MODULE|-c CODE [ARGS...]`: runs a program as python does, with the agent in it.

The environment variable KINETO_AGENT is set for child processes, so that launchers (torchrun) pass the agent on
where kineto_agent is installed.
"""

import io
import os
import pkgutil
import runpy
import sys
import types
from typing import List

import kineto_agent
from kineto_agent.system import env

_USAGE = "usage: python -m kineto_agent (SCRIPT | -m MODULE | -c CODE) [ARGS...]\n"


def main(arguments: List[str]) -> int:
    """Run the program with the agent. Returns 2 after a usage error, else 0 unless the program exits by itself."""
    if not arguments or (arguments[0] in ("-m", "-c") and len(arguments) < 2):
        sys.stderr.write(_USAGE)
        return 2
    os.environ.setdefault(env.AGENT, "1")
    if env.is_on():
        kineto_agent.start()
    first, rest = arguments[0], arguments[1:]
    if first == "-m":
        _run_module(rest[0], rest[1:])
    elif first == "-c":
        _run_code(rest[0], rest[1:])
    else:
        _run_script(first, rest)
    return 0


def _run_module(name: str, arguments: List[str]) -> None:
    sys.argv[:] = ["-m", *arguments]
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` calls


def _run_code(text: str, arguments: List[str]) -> None:
    sys.argv[:] = ["-c", *arguments]
    _set_first_path("")
    exec(compile(text, "<string>", "exec"), _fresh_main().__dict__)  # noqa: S102 - that is the job


def _run_script(path: str, arguments: List[str]) -> None:
    sys.argv[:] = [path, *arguments]
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__.py
        _set_first_path(path)
        runpy.run_path(path, run_name="__main__")
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    full_path = os.path.abspath(path)
    try:
        with io.open_code(full_path) as stream:
            source = stream.read()
    except OSError as exc:
        message = "%s: can't open file %r: [Errno %s] %s\n"
        sys.stderr.write(message % (sys.executable, full_path, exc.errno, exc.strerror))
        raise SystemExit(2) from None
    module = _fresh_main()
    module.__file__ = full_path
    exec(compile(source, full_path, "exec"), module.__dict__)  # noqa: S102 - that is the job


def _set_first_path(folder: str) -> None:
    """Put the script's own folder in the first place, where `python -m` put the working directory."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _fresh_main() -> types.ModuleType:
    """An empty `__main__` that stays, so that pickle and multiprocessing find the program's names in it."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
