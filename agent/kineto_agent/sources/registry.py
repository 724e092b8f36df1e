"""Chooses the activity sources of this process that serve a request.

A source is one folder (interface.py defines the interface) and one row of SOURCES, or a plug-in that the daemon has
sent (plugins/).
"""

import os
import sys
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from kineto_agent.sources.cupti.activity_kinds import KINDS
from kineto_agent.sources.interface import Source, SourceError
from kineto_agent.sources.plugins.installed import PLUGINS
from kineto_agent.system import env
from kineto_agent.system.debuglog import log_exception

# CUPTI's types, those that only AMD's library records, and Kineto's other names. Any other type that no source offers
# is a misspelling.
ACTIVITY_TYPES: FrozenSet[str] = frozenset(
    (
        *KINDS, "rocm_memory", "rocm_scratch", "cpu_op", "user_annotation", "gpu_user_annotation",
        "external_correlation", "cpu_instant_event",
        "python_function", "mtia_runtime", "mtia_ccp_events", "mtia_insight", "cuda_event", "mtia_counters",
        "glow_runtime", "cuda_profiler_range", "hpu_op", "xpu_runtime", "xpu_driver", "collective_comm",
        "privateuse1_runtime", "privateuse1_driver", "xpu_scope_profiler", "xpu_sync", "hardware_counters",
        "memory_snapshot",  # ours: a file beside the trace
    )
)  # fmt: skip

_TORCH_OPS = "torch_ops"
_CALLS = "python_function"
# Activity types that options add.
_TYPES_OF_OPTIONS = {
    "with_stack": _CALLS,
    "stack_trace": _CALLS,
    "profile_memory": "cpu_instant_event",
}
_EXACT_CALLS = "stack_trace"  # then python_function means every call, including modules', instead of samples
_MODULES = "with_modules"

_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")  # driver; WSL; Tegra
# Without these no Level Zero driver can be in a process, unless drivers are configured by name: Linux; WSL.
_INTEL_DEVICES = ("/dev/dri", "/dev/dxg")
_INTEL_DRIVERS = "ZE_ENABLE_ALT_DRIVERS"
_AMD_DEVICE = "/dev/kfd"


def _everywhere() -> bool:
    return True


def _has_torch() -> bool:
    return "torch" in sys.modules


def _has_jax() -> bool:
    return "jax" in sys.modules


def _has_pjrt_plugin() -> bool:
    return "PJRT_DEVICE" in os.environ or any(name in sys.modules for name in ("torch_xla", "libtpu"))


def _has_nvidia() -> bool:
    return bool(os.environ.get(env.CUPTI_LIBRARY)) or any(map(os.path.exists, _NVIDIA_DEVICES))


def _has_intel() -> bool:
    named = os.environ.get(env.PTI_LIBRARY) or os.environ.get(_INTEL_DRIVERS)
    return bool(named) or any(map(os.path.exists, _INTEL_DEVICES))


def _has_amd() -> bool:
    return bool(os.environ.get(env.ROCPROFILER_LIBRARY)) or os.path.exists(_AMD_DEVICE)


class _Row(NamedTuple):
    """A source that this process may have. Its module is imported only if `possible` says so, since that costs time."""

    module: str  # below kineto_agent.sources
    made_by: str  # its class, called without arguments
    possible: Callable[[], bool]


# In the order in which sessions start. CUPTI and PTI have one set of callbacks, and torch's profiler registers its own:
# our registration must come last.
SOURCES: Tuple[_Row, ...] = (
    _Row("python.stack_sampling", "PythonStacksSource", _everywhere),
    _Row("python.call_tracing", "PythonCallsSource", _everywhere),
    _Row("torch.operators", "TorchOpsSource", _has_torch),
    _Row("memory.allocator_history", "MemorySource", _has_torch),
    _Row("memory.allocator_history", "MemoryEventsSource", _has_torch),
    _Row("jax.xla_session", "JaxSource", _has_jax),
    _Row("jax.pjrt_plugins", "PluginsSource", _has_pjrt_plugin),
    _Row("cupti.gpu_activities", "CuptiSource", _has_nvidia),
    _Row("pti.gpu_activities", "XpuSource", _has_intel),
    _Row("rocprofiler.gpu_activities", "RocprofilerSource", _has_amd),
)
_sources: Dict[str, Source] = {}  # by class, once created


class SourceChoice(NamedTuple):
    """A source and the activity types it should record."""

    source: Source
    activity_types: FrozenSet[str]


class RecordingPlan(NamedTuple):
    """Assigns activity types to sources. missing: wanted types that no source of this process offers now; why: if
    known.

    problems: errors of sources that should record but cannot. notes: for the user.
    """

    choices: List[SourceChoice]
    missing: List[str]
    why: str = ""
    problems: Tuple[SourceError, ...] = ()
    notes: Tuple[str, ...] = ()

    def cannot(self) -> str:
        """A message that names what is missing."""
        words = "this process cannot record %s" % ", ".join(self.missing)
        return "%s: %s" % (words, self.why) if self.why else words


def sources() -> List[Source]:
    """The sources of this process in the order in which they start, each created when it first becomes possible.

    Plug-ins come first and therefore stop last: a hanging one does not prolong the recording of other sources. Never
    raises.
    """
    for row in SOURCES:
        if row.made_by not in _sources and row.possible():
            try:
                # Not importlib: the loader of a live attach gives our modules their own __import__, and importlib would
                # find a kineto_agent that the program has installed.
                module = __import__("kineto_agent.sources." + row.module, fromlist=(row.made_by,))
                _sources[row.made_by] = getattr(module, row.made_by)()
            except Exception:  # noqa: BLE001 - a process without a usable source still has the others
                log_exception("the source %s cannot be loaded" % row.module)
    return [*_plugins(), *(_sources[row.made_by] for row in SOURCES if row.made_by in _sources)]


def _plugins() -> List[Any]:
    try:
        return [*PLUGINS.sources()]
    except Exception:  # noqa: BLE001 - as above
        log_exception("plug-ins")
        return []


def offers(available: Iterable[Source]) -> Dict[str, List[str]]:
    """The activity types that each source could record now, by the name of the source. Never raises."""
    result: Dict[str, List[str]] = {}
    for source in available:
        try:
            result[source.name] = list(source.activity_types())
        except Exception:  # noqa: BLE001 - the failure of one source does not affect the others
            log_exception("source %s cannot list its activity types" % source.name)
            result[source.name] = []
    return result


def choose(available: List[Source], wanted: List[str], options: Optional[Mapping[str, Any]] = None) -> RecordingPlan:
    """Choose the sources for these activity types and those added by options (wire.Start). wanted: empty: the defaults.

    Raises SourceError if there are none.
    """
    options = options or {}
    offered = _without_last_resorts(available, offers(available))
    why = ""
    recorders = [source for source in available if hasattr(source, "why_no_calls")]
    if options.get(_EXACT_CALLS):
        refusals = {source.name: source.why_no_calls(options) for source in recorders}
        calls = [name for name, refusal in refusals.items() if not refusal]
        why = "" if calls else "; ".join(refusals.values())
        offered = _with_exact_calls(offered, calls[:1])
    everything: FrozenSet[str] = frozenset().union(*offered.values())
    there = ", ".join(sorted(everything)) or "nothing"
    plugins = [source for source in available if hasattr(source, "declared_types")]
    declared: FrozenSet[str] = frozenset().union(*(source.declared_types for source in plugins))
    unknown = sorted(set(wanted) - ACTIVITY_TYPES - everything - declared)
    if unknown:
        reason = "unknown activity type %s; this process offers: %s" % (", ".join(unknown), there)
        raise SourceError("UNKNOWN_ACTIVITY_TYPE", reason)
    added = frozenset(kind for option, kind in _TYPES_OF_OPTIONS.items() if options.get(option))
    asked = frozenset(wanted)
    choices = []
    for source in available:
        types = offered[source.name]
        own = types & asked if asked else types - source.on_request
        if own or types & added:
            choices.append(SourceChoice(source, own | types & added))
    missing = sorted((asked | added) - everything)
    plan = RecordingPlan(choices, missing, why if _CALLS in missing else _why_not(available, missing))
    plan = _with_plugins(plan, plugins, asked)
    if options.get(_MODULES) and not options.get(_EXACT_CALLS):
        plan = _with_modules(plan, recorders, options)
    if not choices:
        raise plan.problems[0] if plan.problems else SourceError("NOTHING_TO_RECORD", _nothing(plan, there))
    return plan


def _with_modules(plan: RecordingPlan, recorders: List[Any], options: Mapping[str, Any]) -> RecordingPlan:
    """Add the calls of modules, in which the operators ran, or why they cannot be recorded."""
    if not any(choice.source.name == _TORCH_OPS for choice in plan.choices):
        return plan
    for source in recorders[:1]:
        why = source.why_no_calls(options)
        if why:
            return plan._replace(problems=(*plan.problems, SourceError("PYTHON_CALLS_UNAVAILABLE", why)))
        plan.choices.append(SourceChoice(source, frozenset()))
    return plan


def _with_plugins(plan: RecordingPlan, plugins: List[Any], asked: FrozenSet[str]) -> RecordingPlan:
    """Add why plug-ins do not record requested types."""
    problems, notes, absent, why = [], [], [], [plan.why] if plan.why else []
    for source in plugins:
        trouble, needs = source.trouble(asked), source.needs_start()
        is_missed = bool(source.declared_types.intersection(plan.missing))
        if trouble is not None:
            problems.append(SourceError(trouble.reason_code, "%s: %s" % (source.name, trouble.reason)))
        elif needs and is_missed:
            problems.append(SourceError("PLUGIN_NEEDS_START", needs + "; start the program with it, then trace again"))
        elif needs and not asked:
            notes.append(needs)
        if is_missed and (source.is_present or _names_own_type(source.name, plan.missing)):
            why.append(source.why_missing())
        elif is_missed:
            absent.append(source.looks_for())
    if absent and not why:  # otherwise the other reason is the real one
        why.append("no accelerator was found in it (%s)" % "; ".join(absent))
    return plan._replace(why="; ".join(why), problems=tuple(problems), notes=tuple(notes))


def _names_own_type(plugin: str, types: List[str]) -> bool:
    """Whether a type belongs to this plug-in alone, unlike shared ones such as `kernel`."""
    return any(kind.startswith(plugin + "_") for kind in types)


def _without_last_resorts(available: List[Source], offered: Mapping[str, List[str]]) -> Dict[str, FrozenSet[str]]:
    """The types that each source offers, without those that it leaves to another source (`last_resort`)."""
    changed = {name: frozenset(types) for name, types in offered.items()}
    for source in available:
        if hasattr(source, "last_resort"):
            others = frozenset(kind for name, types in offered.items() if name != source.name for kind in types)
            changed[source.name] -= source.last_resort() & others
    return changed


def _why_not(available: List[Source], missing: List[str]) -> str:
    """Combines the sources' explanations for missing types."""
    reasons = [source.why_not(missing) for source in available if missing and hasattr(source, "why_not")]
    return "; ".join(filter(None, reasons))


def _with_exact_calls(offered: Dict[str, FrozenSet[str]], names: List[str]) -> Dict[str, FrozenSet[str]]:
    """Make these sources record Python's calls, and no source sample them."""
    return {name: types | {_CALLS} if name in names else types - {_CALLS} for name, types in offered.items()}


def _nothing(plan: RecordingPlan, there: str) -> str:
    if not plan.missing:
        return "no activity source works in this process"
    return plan.cannot() if plan.why else "%s; it offers: %s" % (plan.cannot(), there)
