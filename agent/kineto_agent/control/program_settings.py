"""Reads the program's settings that affect its speed: torch's, the interpreter's and environment variables.

Theory of operation
    They are read once per capture, before the sources start. Nothing is imported and nothing is changed: a module that
    the program has not imported has no settings. Each value is a getter in C that neither computes nor allocates (so
    not gc.get_freeze_count(), which traverses all frozen objects with the GIL); failing ones are left out. No Python
    code of the program runs.

    torch keeps the number of threads per thread: once a thread has read it, later calls of torch.set_num_threads do not
    change its value. So a new thread reads it. Settings that torch keeps per thread (autocast, grad mode, inference
    mode) cannot be read from another thread, and are not included.

    The deprecated getters of TF32 may print a warning into the program. They are called only if torch has no others.

    Optimizers are those that the iteration counter has seen. Parameters with gradients outside of optimizers are not
    searched for: a walk over all objects of the program holds the GIL for about 40 ms per million objects.

    Only environment variables on an allow list are read, so that no secrets are.
"""

import gc
import os
import sys
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

from kineto_agent.system.debuglog import log_exception
from kineto_agent.system.threads import start_thread

Value = Union[bool, int, float, str]

VARIABLES = (
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "OMP_DYNAMIC", "GOMP_CPU_AFFINITY",
    "MKL_NUM_THREADS", "MKL_DYNAMIC", "KMP_AFFINITY", "KMP_BLOCKTIME", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "MALLOC_ARENA_MAX", "LD_PRELOAD", "TOKENIZERS_PARALLELISM",
    "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_ORDER", "CUDA_CACHE_DISABLE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_JIT",
    "TORCH_DISTRIBUTED_DEBUG", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCH_COMPILE_DEBUG", "TORCH_LOGS",
    "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "HIP_VISIBLE_DEVICES",
    "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "JAX_DISABLE_JIT", "JAX_DEBUG_NANS",
    "PYTHONMALLOC", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG", "PYTHONTRACEMALLOC", "PYTHON_GIL",
)  # fmt: skip
PREFIXES = ("NCCL_", "TORCH_NCCL_", "RCCL_")
MAX_SETTINGS = 128
MAX_CHARS = 200
MAX_NAME = 60
MAX_OPTIMIZERS = 8
MAX_ALL_CHARS = 8000  # in JSON a character may take six bytes: far below the frame limit
_TIMEOUT_S = 0.5
_SAFE_TYPES = (bool, int, float, str)

# Getters of torch._C without arguments.
_TORCH = (
    ("num_threads", "get_num_threads"),
    ("num_interop_threads", "get_num_interop_threads"),
    ("anomaly_mode", "is_anomaly_enabled"),
    ("deterministic_algorithms", "_get_deterministic_algorithms"),
    ("deterministic_warn_only", "_get_deterministic_algorithms_warn_only"),
    ("cudnn_benchmark", "_get_cudnn_benchmark"),
    ("cudnn_deterministic", "_get_cudnn_deterministic"),
    ("cudnn_enabled", "_get_cudnn_enabled"),
    ("mkldnn_enabled", "_get_mkldnn_enabled"),
    ("flash_attention_allowed", "_get_flash_sdp_enabled"),
    ("memory_efficient_attention_allowed", "_get_mem_efficient_sdp_enabled"),
)
_TF32_GETTER = "_get_fp32_precision_getter"  # from torch 2.9 on; those below warn from then on
_OLD_TF32 = (
    ("matmul_allow_tf32", "_get_cublas_allow_tf32"),
    ("cudnn_allow_tf32", "_get_cudnn_allow_tf32"),
    ("float32_matmul_precision", "_get_float32_matmul_precision"),
)


def program_settings(steppers: Sequence[Any] = (), environ: Mapping[str, str] = os.environ) -> Dict[str, Value]:
    """The settings by name: "torch.num_threads", "python.gc_enabled", "env.OMP_NUM_THREADS". Never raises.

    steppers: weak references to optimizers, among others.
    """
    found: List[Tuple[str, Value]] = []
    try:
        thread = start_thread("kineto-settings", lambda: found.extend(_settings(steppers, environ)))
        thread.join(_TIMEOUT_S)
    except Exception:  # noqa: BLE001 - a capture without them is better than none
        log_exception("the program's settings cannot be read")
    return _fitting(found)


def _settings(steppers: Sequence[Any], environ: Mapping[str, str]) -> Iterator[Tuple[str, Value]]:
    for part, read in (("torch", _torch), ("dynamo", _dynamo), ("python", _python)):
        for name, getter in read():
            try:
                value = getter()
            except Exception:  # noqa: BLE001 - another version
                log_exception("setting %s.%s" % (part, name))
                continue
            if isinstance(value, _SAFE_TYPES):
                yield ("%s.%s" % (part, name), _short(value))
    yield from _optimizers(steppers)
    for variable in _variables(environ):
        yield ("env." + variable, _short(environ.get(variable, "")))


_Getters = Iterator[Tuple[str, Callable[[], Any]]]


def _torch() -> _Getters:
    torch, library = sys.modules.get("torch"), sys.modules.get("torch._C")
    if torch is None or library is None:
        return
    yield ("version", lambda: str(vars(torch).get("__version__", "")))
    yield ("default_dtype", lambda: str(library.get_default_dtype()))
    for name, function in _TORCH:
        getter = getattr(library, function, None)
        if getter is not None:
            yield (name, getter)
    precision = getattr(library, _TF32_GETTER, None)
    if precision is not None:
        yield ("matmul_precision", lambda: precision("cuda", "matmul"))
        yield ("conv_precision", lambda: precision("cuda", "conv"))
        return
    for name, function in _OLD_TF32:
        getter = getattr(library, function, None)
        if getter is not None:
            yield (name, getter)


def _dynamo() -> _Getters:
    """State of torch.compile, if the program has loaded it."""
    utils = _names_in("torch._dynamo.utils")
    counters = utils.get("counters")
    if isinstance(counters, dict):
        yield ("graph_breaks", lambda: _total(counters.get("graph_break")))
        yield ("unique_graphs", lambda: _count(counters.get("stats"), "unique_graphs"))
    compiled = _names_in("torch._dynamo.convert_frame").get("FRAME_COMPILE_COUNTER")
    if isinstance(compiled, dict):
        yield ("compiled_frames", lambda: len(compiled))
        yield ("recompiles", lambda: _total(compiled) - len(compiled))


def _names_in(module: str) -> Dict[str, Any]:
    """The names in a module; empty if it is not loaded, or another object is in its place (None blocks an import)."""
    found = sys.modules.get(module)
    return vars(found) if isinstance(found, type(sys)) else {}


def _total(counts: Any) -> int:
    """The sum of a Counter's values; 0 if there is none."""
    values = list(dict.values(counts)) if isinstance(counts, dict) else []
    return sum(value for value in values if type(value) is int)


def _count(counts: Any, name: str) -> int:
    value = dict.get(counts, name) if isinstance(counts, dict) else 0
    return value if type(value) is int else 0


def _optimizers(steppers: Sequence[Any]) -> Iterator[Tuple[str, Value]]:
    """For each optimizer that has stepped: the number of its parameters, and how it updates them."""
    seen: Dict[str, int] = {}
    for reference in steppers[:MAX_OPTIMIZERS]:
        # Releases the GIL: the interpreter then gives us 5 ms, in which the program cannot end an optimizer that we
        # hold, which would then be freed on this thread.
        os.stat("/")
        name, parameters, implementation = _optimizer(reference())
        if name:
            seen[name] = seen.get(name, 0) + 1
            key = "optimizer.%s" % (name if seen[name] == 1 else "%s_%d" % (name, seen[name]))
            yield (key + ".parameters", parameters)
            if implementation:
                yield (key + ".implementation", implementation)


def _optimizer(optimizer: Any) -> Tuple[str, int, str]:
    """Class, parameters and implementation; no class if it is not a torch optimizer. Runs no code of the program."""
    try:
        groups = vars(optimizer).get("param_groups")
    except TypeError:
        return ("", 0, "")
    if type(groups) is not list or not all(type(group) is dict for group in groups):
        return ("", 0, "")
    parameters = [group["params"] for group in groups if type(group.get("params")) is list]
    ways = {_implementation(group) for group in groups if "foreach" in group}
    return (type(optimizer).__name__[:MAX_NAME], sum(map(len, parameters)), ways.pop() if len(ways) == 1 else "")


def _implementation(group: Dict[str, Any]) -> str:
    if group.get("fused") is True:
        return "fused"
    foreach = group["foreach"]
    return "foreach" if foreach is True else "for-loop" if foreach is False else "default"


def _python() -> _Getters:
    yield ("usable_cores", lambda: len(os.sched_getaffinity(0)))
    yield ("gc_enabled", gc.isenabled)
    yield ("gc_threshold", lambda: gc.get_threshold()[0])
    yield ("switch_interval_s", sys.getswitchinterval)
    yield ("optimize", lambda: sys.flags.optimize)
    yield ("dev_mode", lambda: bool(sys.flags.dev_mode))
    yield ("jit", lambda: bool(vars(sys)["_jit"].is_enabled()) if "_jit" in vars(sys) else None)
    tracing = getattr(sys.modules.get("_tracemalloc"), "is_tracing", None)
    if tracing is not None:
        yield ("tracemalloc", tracing)
    monitoring: Any = getattr(sys, "monitoring", None)  # from 3.12 on
    if monitoring is not None:
        yield ("monitoring_tools", lambda: ", ".join(filter(None, map(_tool(monitoring), range(6)))))


def _tool(monitoring: Any) -> Callable[[int], str]:
    return lambda number: str(monitoring.get_tool(number) or "")


def _variables(environ: Mapping[str, str]) -> List[str]:
    """The variables that are set and allowed, in the order of VARIABLES."""
    known = [name for name in VARIABLES if name in environ]
    return known + sorted(name for name in list(environ) if name.startswith(PREFIXES))


def _fitting(found: List[Tuple[str, Value]]) -> Dict[str, Value]:
    """As many of the settings as fit into a frame."""
    fitting: Dict[str, Value] = {}
    room = MAX_ALL_CHARS
    for name, value in list(found)[:MAX_SETTINGS]:
        room -= len(name) + len(str(value))
        if room >= 0:
            fitting[name] = value
    return fitting


def _short(value: Value) -> Value:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")[:MAX_CHARS]
    return value
