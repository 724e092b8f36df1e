"""Inspects the JAX that the program has imported, without ever importing or initialising it.

Theory of operation
    JAX's profiler has no public interface: start_trace() keeps its session in jax._src.profiler._profile_state, and the
    classes come from jaxlib's module `_profiler`. Everything used here is looked up at run time, and a JAX that lacks
    something is refused, with the name of the missing part. So is a jaxlib before 0.8: each of its sessions imports
    TensorFlow into the program, if there is one, and otherwise writes to standard error that there is none.

    A backend is JAX's client of one kind of device. Creating one takes a GPU's memory, or a whole TPU, so none is
    created for a program that has none.
"""

import os
import re
import sys
from typing import Any, List, NamedTuple, Tuple

from kineto_agent.sources.interface import SourceError

_PROFILER = "jax._src.profiler"
_BRIDGE = "jax._src.xla_bridge"
_CONFIG = "jax._src.config"
_SESSION, _OPTIONS = "ProfilerSession", "ProfileOptions"
OLDEST = (0, 8)  # jaxlib
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


class Profiler(NamedTuple):
    """JAX's profiler. native: jaxlib's module with the classes; state: of jax.profiler.start_trace()."""

    module: Any
    native: Any
    state: Any

    @property
    def server_runs(self) -> bool:
        """Whether jax.profiler.start_server() has started a server that has not been stopped."""
        return getattr(self.module, "_profiler_server", None) is not None


def imported() -> bool:
    """Whether the program has imported JAX."""
    return _PROFILER in sys.modules and _BRIDGE in sys.modules


def version() -> str:
    """JAX's version as a text."""
    return str(getattr(sys.modules.get("jax"), "__version__", "of unknown version"))


def _jaxlib_version() -> Tuple[int, int]:
    """Returns jaxlib's version; (0, 0) if unknown."""
    text = str(getattr(sys.modules.get("jaxlib.version"), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers.group(1)), int(numbers.group(2))) if numbers else (0, 0)


def clients() -> List[Any]:
    """The clients of the backends that the program has created, without waiting for one that is being created."""
    backends = getattr(sys.modules.get(_BRIDGE), "_backends", None)
    return list(backends.values()) if isinstance(backends, dict) else []


def platforms() -> List[str]:
    """The kinds of devices of those backends, such as "cpu" and "cuda"; sorted."""
    found = set()
    for client in clients():
        platform = str(getattr(client, "platform", "unknown"))
        version_text = str(getattr(client, "platform_version", "")).lower()
        if platform == "gpu":  # a client's own name for both vendors' devices
            platform = "rocm" if "rocm" in version_text else "cuda"
        found.add(platform)
    return sorted(found)


def find() -> Profiler:
    """Returns JAX's profiler. Raises SourceError (JAX_PROFILER_UNAVAILABLE) if this JAX differs from the known ones."""
    if _jaxlib_version() < OLDEST:
        reason = (
            "the profiler of jaxlib %d.%d imports TensorFlow into the program or writes to its standard error; "
            "jaxlib %d.%d and later do neither"
        )
        raise SourceError("JAX_PROFILER_UNAVAILABLE", reason % (*_jaxlib_version(), *OLDEST))
    module = sys.modules.get(_PROFILER)
    native = getattr(module, "_profiler", None)
    state = getattr(module, "_profile_state", None)
    missing = [
        name
        for name, there in (
            (_SESSION, isinstance(getattr(native, _SESSION, None), type)),
            (_SESSION + ".stop", hasattr(getattr(native, _SESSION, None), "stop")),
            (_OPTIONS, isinstance(getattr(native, _OPTIONS, None), type)),
            ("start_server", callable(getattr(native, "start_server", None))),
            ("_profile_state.profile_session", hasattr(state, "profile_session")),
            ("_profile_state.lock", hasattr(getattr(state, "lock", None), "acquire")),
        )
        if not there
    ]
    if missing:
        reason = "this agent does not know the profiler of JAX %s: it has no %s" % (version(), ", ".join(missing))
        raise SourceError("JAX_PROFILER_UNAVAILABLE", reason)
    return Profiler(module, native, state)


def options(profiler: Profiler) -> Any:
    """Options for a session that records HLO operations and nothing of Python. Raises SourceError."""
    wanted = {"python_tracer_level": 0, "host_tracer_level": 2, "enable_hlo_proto": False}
    try:
        made = getattr(profiler.native, _OPTIONS)()
        for name, value in wanted.items():
            getattr(made, name)  # assigning an unknown name might succeed
            setattr(made, name, value)
    except (AttributeError, TypeError) as exc:
        reason = "the profiler of JAX %s does not accept the options of the recording: %s" % (version(), exc)
        raise SourceError("JAX_PROFILER_UNAVAILABLE", reason) from exc
    return made


def profiles_by_itself() -> bool:
    """Whether JAX's automatic profile-guided optimisation is on: it opens sessions of its own accord."""
    setting = getattr(sys.modules.get(_CONFIG), "enable_pgle", None)
    return bool(getattr(setting, "value", False))


def logs_sessions() -> bool:
    """Whether XLA writes a line to standard error for each session. It does unless disabled; JAX disables it."""
    try:
        return int(os.environ.get(_LOG_LEVEL, "0")) < 1
    except ValueError:
        return True
