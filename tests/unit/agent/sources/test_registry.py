import sys
from types import ModuleType
from typing import Any, FrozenSet, Iterable, List, Mapping

import pytest
from kineto_agent.protocol.plugin_bundle import Plugin, Signs
from kineto_agent.protocol.schema import to_json
from kineto_agent.sources import registry
from kineto_agent.sources.interface import Source, SourceError, SourceRequest, SourceSession
from kineto_agent.sources.plugins.installed import InstalledPlugins
from kineto_agent.sources.rocprofiler import gpu_activities as rocm_kinds
from kineto_agent.system import env
from support.agent.plugins import plugin, sealed, toy_schema
from support.agent.python_child import run_python


class Named:
    def __init__(self, name: str, *types: str, on_request: FrozenSet[str] = frozenset()) -> None:
        self.name = name
        self.on_request = on_request
        self._types = types

    def activity_types(self) -> List[str]:
        if "crash" in self._types:
            raise RuntimeError("no")
        return list(self._types)

    def would_yield(self, request: SourceRequest) -> bool:
        return False

    def prepare(self, request: SourceRequest) -> SourceSession:
        raise NotImplementedError(request)


GPU: Source = Named("cupti", "kernel", "gpu_memcpy")
STACKS: Source = Named("python_stacks", "python_function")
IDLE: Source = Named("cupti")


def chosen(plan: registry.RecordingPlan) -> Any:
    return [(choice.source.name, sorted(choice.activity_types)) for choice in plan.choices]


def refusal(available: List[Source], wanted: List[str]) -> "tuple[str, str]":
    with pytest.raises(SourceError) as caught:
        registry.choose(available, wanted)
    return caught.value.reason_code, caught.value.reason


class Refusing(Named):
    def why_not(self, missing: Iterable[str]) -> str:
        return "its profiler is in use" if not {"cpu_op", "kernel"}.isdisjoint(missing) else ""


def test_a_source_that_offers_nothing_says_why_where_its_types_are_missing() -> None:
    refusing: Source = Refusing("jax")
    plan = registry.choose([STACKS, refusing], ["python_function", "cpu_op"])
    assert plan.cannot() == "this process cannot record cpu_op: its profiler is in use"
    assert refusal([refusing], ["cpu_op"]) == ("NOTHING_TO_RECORD", plan.cannot())
    assert registry.choose([STACKS, refusing], ["python_function"]).missing == []


def test_no_wish_means_everything_that_is_offered() -> None:
    plan = registry.choose([GPU, STACKS], [])
    assert chosen(plan) == [("cupti", ["gpu_memcpy", "kernel"]), ("python_stacks", ["python_function"])]
    assert plan.missing == []


def test_types_on_request_are_recorded_only_if_they_are_named() -> None:
    dear: Source = Named("cupti", "kernel", "cuda_sync", on_request=frozenset(["cuda_sync"]))
    assert chosen(registry.choose([dear, STACKS], [])) == [
        ("cupti", ["kernel"]),
        ("python_stacks", ["python_function"]),
    ]
    assert chosen(registry.choose([dear], ["cuda_sync", "kernel"])) == [("cupti", ["cuda_sync", "kernel"])]


class Deferring(Named):
    def last_resort(self) -> FrozenSet[str]:
        return frozenset(["kernel", "xpu_runtime"])


def test_a_last_resort_records_only_what_no_other_source_offers() -> None:
    torch: Source = Deferring("torch_ops", "cpu_op", "kernel", "xpu_runtime")
    vendor: Source = Named("pti", "kernel", "gpu_memcpy")
    assert chosen(registry.choose([torch, vendor], [])) == [
        ("torch_ops", ["cpu_op", "xpu_runtime"]),
        ("pti", ["gpu_memcpy", "kernel"]),
    ]
    assert chosen(registry.choose([torch, IDLE], ["kernel"])) == [("torch_ops", ["kernel"])]


def test_an_option_brings_its_type_beside_the_defaults() -> None:
    files: Source = Named("memory_events", "cpu_instant_event", on_request=frozenset(["cpu_instant_event"]))
    plan = registry.choose([STACKS, files], [], {"profile_memory": True})
    assert chosen(plan) == [("python_stacks", ["python_function"]), ("memory_events", ["cpu_instant_event"])]
    assert registry.choose([STACKS], [], {"profile_memory": True}).missing == ["cpu_instant_event"]
    assert chosen(registry.choose([STACKS, files], [], {"profile_memory": False})) == [
        ("python_stacks", ["python_function"])
    ]


def test_only_the_sources_of_the_wanted_types_are_chosen() -> None:
    assert chosen(registry.choose([GPU, STACKS], ["kernel"])) == [("cupti", ["kernel"])]


def test_a_type_of_kineto_that_is_not_there_now_is_missing() -> None:
    plan = registry.choose([IDLE, STACKS], ["kernel", "python_function"])
    assert chosen(plan) == [("python_stacks", ["python_function"])]
    assert plan.missing == ["kernel"]


def test_a_misspelt_type_is_named_with_what_there_is() -> None:
    assert refusal([GPU], ["kernal", "kernel"]) == (
        "UNKNOWN_ACTIVITY_TYPE",
        "unknown activity type kernal; this process offers: gpu_memcpy, kernel",
    )


def test_a_sources_own_type_is_known() -> None:
    assert chosen(registry.choose([Named("mine", "my_type")], ["my_type"])) == [("mine", ["my_type"])]


def test_nothing_to_record_says_what_there_is() -> None:
    assert refusal([IDLE, STACKS], ["kernel"]) == (
        "NOTHING_TO_RECORD",
        "this process cannot record kernel; it offers: python_function",
    )
    assert refusal([IDLE], []) == ("NOTHING_TO_RECORD", "no activity source works in this process")
    assert refusal([], ["kernel"]) == ("NOTHING_TO_RECORD", "this process cannot record kernel; it offers: nothing")


def test_a_source_that_fails_to_answer_offers_nothing() -> None:
    assert registry.offers([Named("bad", "crash"), STACKS]) == {"bad": [], "python_stacks": ["python_function"]}


def test_python_stacks_are_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv(env.CUPTI_LIBRARY, raising=False)
    monkeypatch.setattr(registry, "_NVIDIA_DEVICES", ())
    monkeypatch.setattr(registry, "_sources", {})
    assert [source.name for source in registry.sources()] == ["python_stacks", "python_calls"]


def test_cupti_is_loaded_where_there_could_be_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(registry, "_NVIDIA_DEVICES", ("/",))
    monkeypatch.setattr(registry, "_sources", {})
    assert [source.name for source in registry.sources()] == ["python_stacks", "python_calls", "cupti"]


def test_every_row_of_the_table_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setattr(registry, "_NVIDIA_DEVICES", ("/",))
    monkeypatch.setattr(registry, "_sources", {})
    names = ["python_stacks", "python_calls", "torch_ops", "memory_snapshot", "memory_events", "cupti"]
    assert [source.name for source in registry.sources()] == names


def torch_ops() -> Source:
    return Named("torch_ops", "cpu_op", "user_annotation")


class Calls(Named):
    """Records every call of Python."""

    def why_no_calls(self, options: Mapping[str, Any]) -> str:
        return str(options.get("why", ""))


def test_exact_calls_have_a_source_of_their_own_and_nobody_samples() -> None:
    available: List[Source] = [STACKS, Calls("python_calls"), torch_ops()]
    assert chosen(registry.choose(available, [], {"stack_trace": True})) == [
        ("python_calls", ["python_function"]),
        ("torch_ops", ["cpu_op", "user_annotation"]),
    ]
    assert chosen(registry.choose(available[:2], [], {"stack_trace": True})) == [("python_calls", ["python_function"])]


def test_exact_calls_hold_those_of_modules() -> None:
    available: List[Source] = [STACKS, Calls("python_calls"), torch_ops()]
    plan = registry.choose(available, [], {"stack_trace": True, "with_modules": True, "with_flops": True})
    assert chosen(plan) == [("python_calls", ["python_function"]), ("torch_ops", ["cpu_op", "user_annotation"])]


def test_calls_of_modules_come_from_the_same_source_beside_operators() -> None:
    plan = registry.choose([STACKS, Calls("python_calls"), torch_ops()], [], {"with_modules": True})
    operators = ("torch_ops", ["cpu_op", "user_annotation"])
    assert chosen(plan) == [("python_stacks", ["python_function"]), operators, ("python_calls", [])]
    assert not chosen(registry.choose([STACKS, Calls("python_calls")], [], {"with_modules": True}))[1:]


def test_why_modules_cannot_be_recorded_is_a_problem_and_operators_are_recorded() -> None:
    plan = registry.choose([Calls("python_calls"), torch_ops()], [], {"with_modules": True, "why": "a debug build"})
    assert chosen(plan) == [("torch_ops", ["cpu_op", "user_annotation"])]
    assert [(each.reason_code, each.reason) for each in plan.problems] == [
        ("PYTHON_CALLS_UNAVAILABLE", "a debug build")
    ]


def test_torchs_profiler_never_records_calls_of_python() -> None:
    plan = registry.choose([GPU, STACKS, torch_ops()], [], {"stack_trace": True})
    assert chosen(plan) == [("cupti", ["gpu_memcpy", "kernel"]), ("torch_ops", ["cpu_op", "user_annotation"])]
    assert plan.missing == ["python_function"]


def test_exact_stacks_are_missing_where_nobody_can_record_them() -> None:
    plan = registry.choose([GPU, STACKS], [], {"stack_trace": True})
    assert chosen(plan) == [("cupti", ["gpu_memcpy", "kernel"])]
    assert plan.missing == ["python_function"]


def test_why_exact_calls_cannot_be_recorded_is_told() -> None:
    options = {"stack_trace": True, "why": "a debug build: leave the option out"}
    said = "this process cannot record python_function: a debug build: leave the option out"
    with pytest.raises(SourceError) as raised:
        registry.choose([STACKS, Calls("python_calls")], [], options)
    assert raised.value.reason == said
    assert registry.choose([GPU, STACKS, Calls("python_calls")], [], options).cannot() == said


def test_an_option_adds_its_type_to_those_that_are_named() -> None:
    plan = registry.choose([GPU, STACKS], ["kernel"], {"with_stack": True})
    assert chosen(plan) == [("cupti", ["kernel"]), ("python_stacks", ["python_function"])]


def test_an_option_adds_a_type_that_is_recorded_on_request_only() -> None:
    file: Source = Named("memory_events", "cpu_instant_event", on_request=frozenset(["cpu_instant_event"]))
    assert chosen(registry.choose([STACKS, file], [])) == [("python_stacks", ["python_function"])]
    plan = registry.choose([STACKS, file], [], {"profile_memory": True})
    assert chosen(plan) == [("python_stacks", ["python_function"]), ("memory_events", ["cpu_instant_event"])]


# ------------------------------------------------------------ what a process cannot have

WITHOUT = """
import os, sys
os.path.exists = lambda path: False
from kineto_agent.control import runner
from kineto_agent.sources import registry
runner.self_description.hello(registry.offers(registry.sources()), 0, "", iteration_ns=0)
of_accelerators = ("kit", "jax", "pti", "rocprofiler", "plugins.")
unwanted = ["kineto_agent.protocol.plugin_bundle", *("kineto_agent.sources." + name for name in of_accelerators)]
unwanted.append("kineto_agent.protocol.schema")
allowed = "kineto_agent.sources.plugins.installed"
print([name for name in sys.modules if name.startswith(tuple(unwanted)) and name != allowed])
"""


@pytest.mark.slow
def test_a_process_without_an_accelerator_loads_nothing_for_one() -> None:
    ended = run_python(["-c", WITHOUT])
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("module", "variable"),
    [
        ("pti.gpu_activities", "KINETO_PTI_LIBRARY"),
        ("pti.gpu_activities", "ZE_ENABLE_ALT_DRIVERS"),
        ("rocprofiler.gpu_activities", "KINETO_ROCPROFILER_LIBRARY"),
    ],
)
def test_a_device_or_a_variable_makes_a_gpu_possible(
    module: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = [row for row in registry.SOURCES if row.module == module]
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.path.exists", lambda _path: False)
    assert not row.possible()
    monkeypatch.setenv(variable, "/mine.so")
    assert row.possible()
    monkeypatch.delenv(variable)
    monkeypatch.setattr("os.path.exists", lambda path: path in ("/dev/dri", "/dev/kfd"))
    assert row.possible()


def test_the_types_of_amds_library_are_no_misspellings() -> None:
    assert set(rocm_kinds.KINDS) <= registry.ACTIVITY_TYPES


# ------------------------------------------------------------ plug-ins


def with_plugin(*made: Plugin) -> List[Any]:
    plugins = InstalledPlugins()
    plugins.take(sealed(list(made)), "digest")
    return [*plugins.sources(), GPU]


def reasons(plan: registry.RecordingPlan) -> List[Any]:
    return [(problem.reason_code, problem.reason) for problem in plan.problems]


def test_a_plug_in_records_beside_the_others() -> None:
    available = with_plugin(plugin())
    assert chosen(registry.choose(available, [])) == [("toy", ["toy_kernel"]), ("cupti", ["gpu_memcpy", "kernel"])]
    assert chosen(registry.choose(available, ["toy_kernel"])) == [("toy", ["toy_kernel"])]


def test_a_plug_in_that_fails_is_a_problem_of_every_request_that_wants_it() -> None:
    available = with_plugin(plugin("raise ValueError('odd')"))
    failed = [("PLUGIN_FAILED", "toy: loading it: raised ValueError: odd")]
    plan = registry.choose(available, [])
    assert (chosen(plan), reasons(plan)) == ([("cupti", ["gpu_memcpy", "kernel"])], failed)
    plan = registry.choose(available, ["toy_kernel", "kernel"])
    assert (reasons(plan), plan.missing, plan.why) == (failed, ["toy_kernel"], failed[0][1])
    assert reasons(registry.choose(available, ["kernel"])) == []
    assert refusal(available, ["toy_kernel"]) == failed[0]


def test_a_type_of_a_plug_in_whose_accelerator_is_not_here_is_no_misspelling() -> None:
    code, reason = refusal(with_plugin(plugin(signs=Signs(libraries=("libtoy.so*",)))), ["toy_kernel"])
    assert code == "NOTHING_TO_RECORD"
    assert "toy finds no sign of its accelerator in this process (libraries libtoy.so*)" in reason


def absent() -> Plugin:
    """A plug-in that shares `kernel` with others, and whose accelerator is not here."""
    schema = to_json(toy_schema())
    made = plugin(signs=Signs(libraries=("libtoy.so*",)))
    return made._replace(schema={**schema, "types": {**schema["types"], "kernel": {}}})


def test_a_plug_in_whose_accelerator_is_not_here_is_not_blamed_for_a_type_that_others_record() -> None:
    toy, refusing = with_plugin(absent())[0], Refusing("jax")
    in_use = "this process cannot record kernel: its profiler is in use"
    assert refusal([toy, refusing], ["kernel"]) == ("NOTHING_TO_RECORD", in_use)
    _code, reason = refusal([toy, refusing], ["kernel", "toy_kernel"])
    assert reason.endswith("in use; toy finds no sign of its accelerator in this process (libraries libtoy.so*)")
    seen = "this process cannot record kernel: no accelerator was found in it (toy looks for libraries libtoy.so*)"
    assert refusal([toy, STACKS], ["kernel"]) == ("NOTHING_TO_RECORD", seen)


def test_what_a_process_had_to_be_started_with_is_told_instead_of_nothing_to_record() -> None:
    available = with_plugin(plugin(needs_from_start="TOY_PROFILE=1"))
    needs = "toy records only processes that were started with the variable TOY_PROFILE=1"
    advice = "; start the program with it, then trace again"
    assert refusal(available, ["toy_kernel"]) == ("PLUGIN_NEEDS_START", needs + advice)
    plan = registry.choose(available, [])
    assert (reasons(plan), plan.notes) == ([], (needs,))
    plan = registry.choose(available, ["kernel"])
    assert (reasons(plan), plan.notes) == ([], ())


def test_one_that_cannot_be_detached_records_only_what_is_named() -> None:
    available = with_plugin(plugin(detach="never"))
    assert chosen(registry.choose(available, [])) == [("cupti", ["gpu_memcpy", "kernel"])]
    assert chosen(registry.choose(available, ["toy_kernel"])) == [("toy", ["toy_kernel"])]


def test_plug_ins_start_first_and_so_stop_last(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = InstalledPlugins()
    plugins.take(sealed([plugin()]), "digest")
    monkeypatch.setattr(registry, "PLUGINS", plugins)
    assert [source.name for source in registry.sources()][:2] == ["toy", "python_stacks"]
