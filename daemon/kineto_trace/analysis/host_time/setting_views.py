"""The view of the program's settings when it was recorded, and which of them are known to make it slower."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kineto_trace.kernel_traits.gpu_vendors import GpuVendor, vendor_of_properties
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NO_SETTINGS = "the program's settings are not in this trace: kinetod records them, other tools do not"
PER_THREAD = "torch keeps autocast, grad mode and inference mode for each thread by itself: they are not recorded"
Value = bool | int | float | str

SLOWS, MAY_SLOW = "slows", "may slow"
FEW_CORES = 4
_TF32_SINCE = 8  # major compute capability
_ON = ("1", "true", "yes", "on", "y")
_CONVOLUTION = ("aten::cudnn_convolution", "aten::miopen_convolution")


@view(
    "settings",
    columns(
        (
            "setting",
            "text",
            "",
            "torch.*, dynamo.*, optimizer.*, python.*, and env.* for environment variables that are set",
        ),
        ("value", "text", "", "when the recording began"),
        ("effect", "text", "", '"slows" or "may slow"; null: not known to cost time'),
        ("judgement", "text", "", "what this value does, where it costs time"),
    ),
)
def settings(context: Context) -> Answer:
    """The settings of torch, Python and the environment when the recording began; those that cost time come first.

    Environment variables are read from an allow list, so that no secrets are recorded. `torch.num_threads` is what a
    new thread of the program would get. Optimizers are those that have stepped before; `parameters` counts tensors.
    """
    found, facts = context.trace.target.settings, facts_of(context.trace)
    judged = {name: verdict(name, value, facts) for name, value in found.items()}

    def order(name: str) -> tuple[int, str]:
        told = judged[name]
        return (2 if told is None else 0 if told.effect == SLOWS else 1), name

    names = sorted(found, key=order)
    values = {
        "setting": names,
        "value": [str(found[name]) for name in names],
        "effect": [told.effect if (told := judged[name]) is not None else None for name in names],
        "judgement": [told.text if (told := judged[name]) is not None else None for name in names],
    }
    if not names:
        return Answer(values, [NO_SETTINGS])
    return Answer(values, [PER_THREAD] if "torch.version" in found else [])


# What is known about settings that make a program slower: one rule for each setting.
# A rule describes the effect of a value, never its size: the figures of the trace show that. A setting without a rule,
# or with a value that is as fast as any other, has no verdict.
class Verdict(NamedTuple):
    """effect: SLOWS or MAY_SLOW."""

    effect: str
    text: str


@dataclass(frozen=True, slots=True)
class SettingFacts:
    """What a rule may use besides the value."""

    settings: Mapping[str, Value]
    on_gpu: bool  # the trace has kernels
    tf32: bool | None  # whether the NVIDIA GPUs support it; None if unknown
    convolves: bool  # on a GPU


Rule = Callable[[Value, SettingFacts], Verdict | None]


def facts_of(trace: Trace) -> SettingFacts:
    """Returns what the rules need to know of a trace."""
    nvidia = [each for each in trace.devices if vendor_of_properties(each) in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)]
    majors = [major for device in nvidia if isinstance(major := device.get("computeMajor"), int)]
    return SettingFacts(
        settings=trace.target.settings,
        on_gpu=len(trace.table("kernel")) > 0,
        tf32=all(major >= _TF32_SINCE for major in majors) if majors else None,
        convolves=any(name in trace.strings for name in _CONVOLUTION),
    )


def verdict(name: str, value: Value, facts: SettingFacts) -> Verdict | None:
    """Returns what is known about this value of a setting; None if nothing is."""
    rule = RULES.get(name) or (_updates if name.startswith("optimizer.") else None)
    return rule(value, facts) if rule is not None else None


def _if_on(effect: str, text: str) -> Rule:
    """Returns a rule for a switch that costs time when it is on."""
    return lambda value, _facts: Verdict(effect, text) if _is_on(value) else None


def _if_off(effect: str, text: str) -> Rule:
    return lambda value, _facts: Verdict(effect, text) if value is False or value == "0" else None


def _is_on(value: Value) -> bool:
    return value.strip().lower() in _ON if isinstance(value, str) else bool(value)


def _if_text(effect: str, text: str, *wanted: str) -> Rule:
    """Returns a rule for one of these values, in any case; without values, for any text but an empty one."""

    def rule(value: Value, _facts: SettingFacts) -> Verdict | None:
        found = str(value).strip().lower()
        return Verdict(effect, text.format(value=value)) if (found in wanted if wanted else found) else None

    return rule


def _threads(value: Value, facts: SettingFacts) -> Verdict | None:
    cores = facts.settings.get("python.usable_cores")
    if not isinstance(value, int) or not isinstance(cores, int) or cores < 1:
        return None
    if value > cores:
        return Verdict(SLOWS, f"operators on the CPU use {value} threads on {cores} usable cores: they take turns")
    if value == 1 and cores >= FEW_CORES and not facts.on_gpu:
        return Verdict(
            MAY_SLOW,
            f"operators on the CPU use one of {cores} usable cores; right where other processes use the others",
        )
    return None


def _tf32(value: Value, facts: SettingFacts) -> Verdict | None:
    if facts.on_gpu and facts.tf32 and value in ("none", "ieee", "highest", False, "0"):
        return Verdict(MAY_SLOW, "float32 matrix products do not use tensor cores; TF32 is faster and less exact")
    return None


def _benchmark(value: Value, facts: SettingFacts) -> Verdict | None:
    if value is False and facts.convolves:
        return Verdict(
            MAY_SLOW, "convolutions are chosen by a rule; measuring them pays where input shapes stay the same"
        )
    return None


def _updates(value: Value, facts: SettingFacts) -> Verdict | None:
    """Judges how an optimizer updates its parameters; by default all together on a GPU, one by one on a CPU."""
    if value == "for-loop" or (value == "default" and not facts.on_gpu):
        return Verdict(MAY_SLOW, "parameters are updated one by one; foreach=True or fused=True updates them together")
    return None


def _counted(text: str) -> Rule:
    return lambda value, _facts: Verdict(MAY_SLOW, text.format(value)) if isinstance(value, int) and value > 0 else None


_WAITS_FOR_EACH_LAUNCH = "each launch waits until its kernel has ended: host and GPU never work at the same time"
_THROUGH_HOST = "GPUs exchange data on a slower way than they could"

RULES: Mapping[str, Rule] = {
    "torch.num_threads": _threads,
    "torch.anomaly_mode": _if_on(SLOWS, "every operator keeps its stack and backward checks every result for NaN"),
    "torch.deterministic_algorithms": _if_on(MAY_SLOW, "slower kernels run where only they are deterministic"),
    "torch.cudnn_deterministic": _if_on(MAY_SLOW, "slower convolutions run where only they are deterministic"),
    "torch.cudnn_benchmark": _benchmark,
    "torch.cudnn_enabled": _if_off(MAY_SLOW, "convolutions and recurrent layers run without cuDNN or MIOpen"),
    "torch.mkldnn_enabled": _if_off(MAY_SLOW, "operators on the CPU run without oneDNN"),
    "torch.matmul_precision": _tf32,
    "torch.float32_matmul_precision": _tf32,
    "dynamo.graph_breaks": _counted("torch.compile has split the program {} times; TORCH_LOGS=graph_breaks says where"),
    "dynamo.recompiles": _counted("torch.compile has compiled code again {} times; TORCH_LOGS=recompiles says why"),
    "python.dev_mode": _if_on(SLOWS, "Python's development mode checks every allocation"),
    "python.tracemalloc": _if_on(SLOWS, "tracemalloc notes a stack for every allocation of Python"),
    "python.monitoring_tools": _if_text(SLOWS, "calls of Python also run a tool: {value}"),
    "env.CUDA_LAUNCH_BLOCKING": _if_on(SLOWS, _WAITS_FOR_EACH_LAUNCH),
    "env.HIP_LAUNCH_BLOCKING": _if_on(SLOWS, _WAITS_FOR_EACH_LAUNCH),
    "env.AMD_SERIALIZE_KERNEL": _if_text(SLOWS, _WAITS_FOR_EACH_LAUNCH, "1", "2", "3"),
    "env.PYTORCH_NO_CUDA_MEMORY_CACHING": _if_text(SLOWS, "every allocation asks the runtime, which stops the GPU"),
    "env.CUDA_CACHE_DISABLE": _if_on(MAY_SLOW, "kernels are compiled anew at each start"),
    "env.NVIDIA_TF32_OVERRIDE": _tf32,
    "env.TORCH_DISTRIBUTED_DEBUG": _if_text(SLOWS, "ranks compare each collective before they begin it", "detail"),
    "env.TORCH_NCCL_BLOCKING_WAIT": _if_on(SLOWS, "the host waits for each collective that it waits on"),
    "env.TORCHDYNAMO_DISABLE": _if_on(MAY_SLOW, "torch.compile does nothing"),
    "env.TORCH_COMPILE_DISABLE": _if_on(MAY_SLOW, "torch.compile does nothing"),
    "env.PYTORCH_JIT": _if_off(MAY_SLOW, "TorchScript runs as plain Python"),
    "env.NCCL_P2P_DISABLE": _if_on(MAY_SLOW, _THROUGH_HOST),
    "env.NCCL_SHM_DISABLE": _if_on(MAY_SLOW, _THROUGH_HOST),
    "env.NCCL_IB_DISABLE": _if_on(MAY_SLOW, "hosts exchange data without InfiniBand or RoCE"),
    "env.NCCL_ALGO": _if_text(MAY_SLOW, "NCCL may not choose the algorithm of each collective"),
    "env.NCCL_PROTO": _if_text(MAY_SLOW, "NCCL may not choose the protocol of each collective"),
    "env.JAX_DISABLE_JIT": _if_on(SLOWS, "JAX runs each operation by itself"),
    "env.JAX_DEBUG_NANS": _if_on(SLOWS, "JAX checks every result for NaN"),
    "env.PYTHONMALLOC": _if_text(SLOWS, "Python checks every allocation", "debug", "malloc_debug", "pymalloc_debug"),
}
