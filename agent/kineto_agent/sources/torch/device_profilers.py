"""Accelerators recorded by torch's own profiler: those with a profiler in its PrivateUse1 registry, Intel's and AMD's.

Theory of operation
    An accelerator outside of PyTorch takes the device type PrivateUse1, renames it, and may register a profiler for
    Kineto with torch::profiler::impl::PrivateUse1ProfilerRegistry (since torch 2.11). Torch forwards that profiler to
    Kineto when a session is prepared; its rows then appear in the session's trace beside the operators. So requesting
    PrivateUse1 from torch's profiler needs nothing from the vendor. In a torch for Intel's or AMD's GPUs, torch's
    profiler records them in the same way.

    torch.profiler.supported_activities() cannot be used: it counts the GPUs, which initialises CUDA in a process that
    has not done so, and it lists every renamed backend, with or without a profiler. The registry itself is queried
    instead, through two exported functions; hasFactory() takes a lock that is held for an instant.
"""

import sys
from typing import Any, FrozenSet, List, NamedTuple, Optional, Tuple

from kineto_agent.system.debuglog import log

_UNNAMED = "privateuseone"  # the name before an accelerator takes the device type
_INSTANCE = "_ZN5torch8profiler4impl27PrivateUse1ProfilerRegistry8instanceEv"
_HAS_FACTORY = "_ZNK5torch8profiler4impl27PrivateUse1ProfilerRegistry10hasFactoryEv"
_DEVICE_TYPES = ("kernel", "gpu_memcpy", "gpu_memset")
ALL_TYPES: FrozenSet[str] = frozenset(
    (*_DEVICE_TYPES, "privateuse1_runtime", "privateuse1_driver", "xpu_runtime", "xpu_driver", "cuda_runtime")
)


class DeviceProfiler(NamedTuple):
    """An accelerator that torch's profiler records beside operators."""

    activity: str  # of torch.profiler.ProfilerActivity
    name: str  # of the accelerator, for people: "npu"
    types: Tuple[str, ...]  # activity types
    last_resort: bool  # a source for this vendor has priority for types that it offers, too


def find() -> Optional[DeviceProfiler]:
    """The accelerator that torch's profiler records in this process now. Cheap, without side effects; never raises."""
    name = _private_backend()
    if name and _has_factory():
        types = (*_DEVICE_TYPES, "privateuse1_runtime", "privateuse1_driver")
        return DeviceProfiler("PrivateUse1", name, types, last_resort=False)
    if _uses_xpu():
        return DeviceProfiler("XPU", "xpu", (*_DEVICE_TYPES, "xpu_runtime", "xpu_driver"), last_resort=True)
    if _uses_rocm():  # torch uses CUDA's names for it
        return DeviceProfiler("CUDA", "rocm", (*_DEVICE_TYPES, "cuda_runtime"), last_resort=True)
    return None


def _private_backend() -> str:
    """The name given to PrivateUse1 by an accelerator; "" if there is none."""
    try:
        torch_c: Any = sys.modules["torch._C"]
        name = str(torch_c._get_privateuse1_backend_name())
    except (KeyError, AttributeError):
        return ""
    return "" if name == _UNNAMED else name


class _Registry:
    """PrivateUse1ProfilerRegistry of the loaded torch. Raises OSError, AttributeError and KeyError."""

    def __init__(self) -> None:
        import ctypes  # only where an accelerator is registered

        from kineto_agent.sources.torch import libtorch_symbols

        library = libtorch_symbols.library()
        self._instance = getattr(library, _INSTANCE)
        self._instance.restype = ctypes.c_void_p
        self._instance.argtypes = ()
        self._has_factory = getattr(library, _HAS_FACTORY)
        self._has_factory.restype = ctypes.c_bool
        self._has_factory.argtypes = (ctypes.c_void_p,)

    def has_factory(self) -> bool:
        """Whether a profiler is registered."""
        return bool(self._has_factory(self._instance()))


_registry: List[Optional[_Registry]] = []  # cached result


def _has_factory() -> bool:
    if not _registry:
        try:
            _registry.append(_Registry())
        except (ImportError, OSError, AttributeError, KeyError) as exc:
            log("this torch has no registry of profilers for PrivateUse1: %s", exc)
            _registry.append(None)
    found = _registry[0]
    return found is not None and found.has_factory()


def _uses_xpu() -> bool:
    """Whether the program has begun to use an Intel GPU through a torch that was built for them."""
    return _has_begun("xpu", "torch.xpu")


def _uses_rocm() -> bool:
    """Likewise an AMD GPU."""
    return _has_begun("hip", "torch.cuda")


def _has_begun(version: str, module: str) -> bool:
    torch: Any = sys.modules.get("torch")
    if not getattr(getattr(torch, "version", None), version, None):
        return False
    return bool(getattr(sys.modules.get(module), "_initialized", False))
