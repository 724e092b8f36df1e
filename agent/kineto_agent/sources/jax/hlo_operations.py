"""HLO operations of JAX programs: which activity types a process offers, and why it does not.

Theory of operation
    A session of JAX's profiler has two kinds of planes. On the host: HLO operations that a CPU ran (cpu_op), and what
    the program and XLA's runtime annotated (user_annotation). On a device: what ran there (kernel). These are Kineto's
    own names, so that everything that reads a trace of PyTorch reads one of JAX.

    With a CPU alone a session is part of a capture by default: the program's steps take some 1.1 to 1.3 times as long
    (docs/measurements.md). With other devices it is recorded only if one of its types is named, since nobody has
    measured what their plug-ins cost. On NVIDIA's and AMD's GPUs XLA's profiler would take CUPTI or rocprofiler away
    from us, and loses to us where we were first: there it is not used. CUPTI has the kernels, and hlo_modules.py says
    from which HLO operations they come.
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
        """Everything, unless the program computes on a CPU alone."""
        platforms = jax_runtime.platforms()
        return frozenset() if platforms == _HOST else frozenset((*_HOST_TYPES, *_DEVICE_TYPES))

    def activity_types(self) -> List[str]:
        """All of them once the program has created a backend, if nothing speaks against a session."""
        return [] if not jax_runtime.platforms() or self._refusal() else self._types()

    def why_not(self, missing: Iterable[str]) -> str:
        """Why it does not offer these types; "" if they are not its own, or if there is no JAX."""
        own = {*_HOST_TYPES, *_DEVICE_TYPES}.intersection(missing)
        if not own or not jax_runtime.imported():
            return ""
        on_cpu = jax_runtime.platforms() == _HOST and own.issubset(_DEVICE_TYPES)
        return self._refusal() or ("JAX computes on the CPU alone here, which has no kernels" if on_cpu else "")

    def would_yield(self, request: SourceRequest) -> bool:
        """No: torch.profiler runs beside it."""
        return False

    def prepare(self, request: SourceRequest) -> XlaSession:
        """Make the arena. Raises SourceError."""
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
        """What speaks against a session in this program at all."""
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
            if profiler.state.profile_session is None:  # otherwise: for now, which prepare() says
                refuse_if_used(profiler)
        except SourceError as error:
            return error.reason
        return ""
