"""Starts the agent in any interpreter: `kinetoctl run` puts this folder in front of PYTHONPATH.

The interpreter imports `sitecustomize` by itself, before the program. This one loads kineto_agent from the
folder it lies in (nothing beside that package becomes importable), takes its own folder off sys.path, and runs
the sitecustomize that the interpreter would have found without it. The environment stays as it is, so that
child processes get the agent too. Every version of Python can read this file; below 3.9 it starts nothing.
"""
# ruff: noqa: ANN001, ANN202 - Python 2 reads this file too

import os
import sys

_OFF = ("", "0")


def _own_folder():
    # type: () -> str
    return os.path.dirname(os.path.abspath(__file__))


def _start_agent():
    # type: () -> None
    if sys.version_info < (3, 9) or os.environ.get("KINETO_AGENT", "1") in _OFF:
        return
    try:
        if "kineto_agent" not in sys.modules:
            _load_package(os.path.dirname(os.path.dirname(_own_folder())))
        sys.modules["kineto_agent"].start()
    except Exception:  # noqa: BLE001, S110 - the program must start as it would without us
        pass


def _load_package(folder):
    # type: (str) -> None
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.join(folder, "__init__.py")
    spec = spec_from_file_location("kineto_agent", path, submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["kineto_agent"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["kineto_agent"]
        raise


def _run_next_sitecustomize():
    # type: () -> None
    own = _own_folder()
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own]
    this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as exc:
        missing = getattr(exc, "name", None) or str(exc).split()[-1].strip("'")
        if missing != __name__:
            raise
    sys.modules.setdefault(__name__, this)


_start_agent()
_run_next_sitecustomize()
