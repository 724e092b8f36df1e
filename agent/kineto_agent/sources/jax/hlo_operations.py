"""HLO operations of JAX programs: the activity types that a process offers, and why others are missing.

Theory of operation
    A session of JAX's profiler has two kinds of planes. On the host: HLO operations that a CPU ran (cpu_op), and
    annotations of the program and of XLA's runtime (user_annotation). On a device: what ran there (kernel). These are
    Kineto's own names, so that everything that reads a trace of PyTorch reads one of JAX.

    With a CPU alone a session is part of a capture by default: the program's steps take some 1.1 to 1.3 times as long
    (docs/measurements.md). With other devices it is recorded only if one of its types is named, since the cost of their
    plug-ins has not been measured. On NVIDIA's and AMD's GPUs XLA's profiler would take CUPTI or rocprofiler away from
    us, or fail where we were first: there it is not used. CUPTI has the kernels, and hlo_modules.py maps them to HLO
    operations.
"""

from typing import FrozenSet, Iterable, List

from kineto_agent.sources.file_arena import FileArena
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.jax import jax_runtime
from kineto_agent.sources.jax.session_guard import refuse_if_used
from kineto_agent.sources.jax.xla_session import MOST_GROWTH, XlaSession

_HOST_TYPES = ("cpu_op", "user_annotation")
_DEVICE_TYPES = ("kernel",)
_GPUS = ("cuda", "rocm")
_HOST = ["cpu"]


class JaxSource:
    """HLO operations through JAX's own profiler."""

    name = "jax"

    @property
    def on_request(self) -> FrozenSet[str]:
        """All types, unless the program computes only on a CPU."""
        platforms = jax_runtime.platforms()
        return frozenset() if platforms == _HOST else frozenset((*_HOST_TYPES, *_DEVICE_TYPES))

    def activity_types(self) -> List[str]:
        """All types, once the program has created a backend, if nothing prevents a session."""
        return [] if not jax_runtime.platforms() or self._refusal() else self._types()

    def why_not(self, missing: Iterable[str]) -> str:
        """Why these types are not offered; "" if they are not this source's, or without JAX."""
        own = {*_HOST_TYPES, *_DEVICE_TYPES}.intersection(missing)
        if not own or not jax_runtime.imported():
            return ""
        on_cpu = jax_runtime.platforms() == _HOST and own.issubset(_DEVICE_TYPES)
        return self._refusal() or ("JAX computes on the CPU alone here, which has no kernels" if on_cpu else "")

    def would_yield(self, request: SourceRequest) -> bool:
        """False: torch.profiler runs beside it."""
        return False

    def prepare(self, request: SourceRequest) -> XlaSession:
        """Create the arena. Raises SourceError."""
        refusal = self._refusal()
        if refusal:
            raise SourceError("JAX_PROFILER_UNAVAILABLE", refusal)
        profiler = jax_runtime.find()
        refuse_if_used(profiler)
        metadata = {
            "jax_version": jax_runtime.version(),
            "platforms": jax_runtime.platforms(),
            "activity_types": sorted(request.activity_types),
        }
        arena = FileArena(self.name, request.buffer_limit_bytes)
        return XlaSession(profiler, arena, metadata, MOST_GROWTH * request.buffer_limit_bytes)

    def _types(self) -> List[str]:
        devices = _DEVICE_TYPES if jax_runtime.platforms() != _HOST else ()
        return [*_HOST_TYPES, *devices]

    def _refusal(self) -> str:
        """Why this program allows no session at all; "" if it does."""
        platforms = jax_runtime.platforms()
        if not platforms:
            return "the program has not used a device yet (JAX has no backend)"
        gpus = [name for name in platforms if name in _GPUS]
        if gpus:
            return "JAX computes on %s here, where its profiler would take the GPU's records from ours" % gpus[0]
        if jax_runtime.logs_sessions():
            return "XLA would write to the program's standard error (TF_CPP_MIN_LOG_LEVEL is 0)"
        try:
            profiler = jax_runtime.find()
            jax_runtime.options(profiler)
            if profiler.state.profile_session is None:  # otherwise the refusal is temporary, and prepare() reports it
                refuse_if_used(profiler)
        except SourceError as error:
            return error.reason
        return ""
