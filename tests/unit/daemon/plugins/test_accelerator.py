"""A declaration that agents could not use is refused with the place and what to do."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from kineto_agent.protocol.plugin_bundle import PLUGIN_API
from kineto_agent.sources import registry
from kineto_agent.sources.plugins import guarded_source
from kinetod.config.value_kinds import PLUGIN_NAME
from kinetod.plugins.accelerator import BUILT_IN, Accelerator, Signs, check, may_import, to_plain
from support.agent.plugins import GOOD, toy_schema
from support.service.plugin_sources import accelerator

SOURCE = GOOD.encode()
LIST = Signs(["lib.so"])  # type: ignore[arg-type]


class Later(NamedTuple):
    interface_version: int = 2


def test_a_good_one_is_taken() -> None:
    made = accelerator(conflicts=frozenset(["torch"]), needs_from_start="TOY=1*", detach="idle")
    assert check(made) is made
    plain = to_plain(made)
    assert (plain["name"], plain["conflicts"], plain["detach"]) == ("toy", ["torch"], "idle")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Later(), "interface_version is 2, but this kinetod supports version 1; install matching releases"),
        (7, "interface_version is None"),
        (accelerator(name="To-y"), "name: 'To-y' must consist of 2 to 16 lower-case letters and digits"),
        (accelerator(name="cupti"), "name: cupti is the name of a source that every agent has"),
        (accelerator(name="other"), "schema.name: 'toy' differs from the plug-in's name 'other'"),
        (accelerator(schema=None), "schema: it is a NoneType, not a kineto_agent.protocol.schema.Schema"),
        (accelerator(schema=toy_schema()._replace(clock="sun")), "there is no clock 'sun'"),
        (accelerator(signs=()), "signs: it is a tuple, not a kinetod.plugins.accelerator.Signs"),
        (accelerator(signs=Signs()), "signs: without any, the plug-in would run in every process"),
        (accelerator(signs=LIST), "signs.libraries: it must be a tuple of at most 16 patterns"),
        (accelerator(signs=Signs(libraries=("",))), "signs.libraries: '' must be a string of 1 to 200 characters"),
        (accelerator(signs=Signs(device_files=("npu0",))), "signs.device_files: 'npu0' must be an absolute path"),
        (accelerator(signs=Signs(device_files=("/de*/npu0",))), "signs.device_files: '/de*/npu0' must be an absolute"),
        (accelerator(signs=Signs(environment=("A B",))), "signs.environment: 'A B' must be an environment variable"),
        (
            accelerator(conflicts=frozenset(["nsys"])),
            "conflicts: frozenset({'nsys'}) must be a frozenset with only these names: torch, jax",
        ),
        (accelerator(needs_from_start="NPU MODE"), "needs_from_start: 'NPU MODE' must be an environment variable"),
        (accelerator(detach="maybe"), "detach: 'maybe' is not one of full, idle, never"),
        (accelerator(agent_files={}), "agent_files: it must be a mapping of 1 to 16 files"),
        (accelerator(agent_files={"npu.py": SOURCE}), "agent_files: 'source.py', which must define SOURCE, is missing"),
        (
            accelerator(agent_files={"source.py": SOURCE, "x.so": b""}),
            "agent_files['x.so']: a file must be called NAME.py",
        ),
        (accelerator(agent_files={"source.py": GOOD}), "agent_files['source.py']: its content is a str, not bytes"),
        (accelerator(agent_files={"source.py": b"#" * (257 << 10)}), "at most 262144 can be sent to agents"),
        (accelerator(agent_files={"source.py": b"x = ("}), "agent_files['source.py']: it is not valid Python 3.9: "),
        (accelerator(agent_files={"source.py": b"match 1:\n case 1: pass"}), "agent_files['source.py']: it is not"),
        (accelerator(agent_files={"source.py": b"\nimport numpy"}), "agent_files['source.py']:2: it imports numpy,"),
        (
            accelerator(agent_files={"source.py": b"import kineto_agent.control"}),
            "it imports kineto_agent.control, but a traced process has only the standard library and ",
        ),
        (accelerator(agent_files={"source.py": b"from . import helper"}), "it imports .helper, but there is no file"),
    ],
)  # fmt: skip
def test_what_agents_cannot_use_is_refused(value: Any, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("allowed", [may_import, guarded_source.may_import])
def test_the_daemon_and_the_agent_allow_the_same_imports(allowed: Callable[[str], bool]) -> None:
    names = ["os", "os.path", "ctypes", "_thread", "numpy", "torch.cuda", "kineto_agent", "kineto_agent.control.link"]
    assert [name for name in (*names, *PLUGIN_API) if allowed(name)] == [
        "os",
        "os.path",
        "ctypes",
        "_thread",
        *PLUGIN_API,
    ]


def test_no_plug_in_can_be_called_like_a_source_of_every_agent() -> None:
    modules = [__import__(f"kineto_agent.sources.{row.module}", fromlist=("x",)) for row in registry.SOURCES]
    names = {getattr(module, row.made_by).name for module, row in zip(modules, registry.SOURCES, strict=True)}
    assert "cupti" in names
    assert {name for name in names if PLUGIN_NAME.fullmatch(name)} <= BUILT_IN


def test_members_without_a_default_are_those_that_everybody_must_think_about() -> None:
    assert set(Accelerator._fields) - set(Accelerator._field_defaults) == {"name", "signs", "agent_files", "schema"}
