"""The loader of a live attach, run here beside the test's own agent."""

import builtins
import marshal
import sys
import time
from pathlib import Path
from typing import Any, Dict

import kineto_agent
import pytest
from kineto_agent.system.gil_rests import Rests

SOURCE = Path(kineto_agent.__file__).parent / "bootstrap" / "loader.py"
_FUTURE_ANNOTATIONS = 0x1000000


class Standard:
    def __init__(self, _give_way: Any) -> None:
        self.get = {"time": time}.__getitem__
        self.import_ = __import__


def modules(**texts: str) -> Any:
    """The modules of a made-up agent, by their last names."""
    text = SOURCE.read_text().replace("from __future__ import annotations", "")
    names = {"builtins": builtins, "marshal": marshal, "sys": sys, "Standard": Standard, "Rests": Rests}
    namespace: Dict[str, Any] = {"__name__": "kineto_loader", **names}
    exec(compile(text, "<kineto-loader>", "exec", _FUTURE_ANNOTATIONS), namespace)
    contents: Dict[str, Any] = {"kineto_agent." + name: (False, [(1, texts[name])]) for name in texts}
    return namespace["_Modules"]({"kineto_agent": (True, []), **contents})


def test_a_module_is_executed_when_it_is_imported_and_its_text_is_not_kept() -> None:
    made = modules(one="from kineto_agent import two\nvalue = two.value", two="value = 7", three="value = 8")
    assert made.get("kineto_agent.one").value == 7
    assert list(made.loaded) == ["kineto_agent", "kineto_agent.one", "kineto_agent.two"]
    left = {name: pieces for name, (_is_package, pieces) in made._contents.items() if pieces}
    assert left == {"kineto_agent.three": [(1, "value = 8")]}


def test_a_module_that_raised_can_be_imported_again() -> None:
    made = modules(one="import builtins\nbuiltins.no_such_name")
    for _ in range(2):
        with pytest.raises(AttributeError, match="no_such_name"):
            made.get("kineto_agent.one")
