"""Whether Kineto is active is asked anew of a torch that was only being imported before."""

import sys
from types import ModuleType
from typing import Any, List

import pytest
from kineto_agent.sources.torch import kineto_state


class Functions:
    def active(self) -> bool:
        return True


def test_while_torch_is_being_imported_nothing_is_concluded_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = ModuleType("torch")
    torch.__file__ = "/nowhere/torch/__init__.py"
    found: List[Any] = []
    monkeypatch.setattr(kineto_state, "_functions", found)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert kineto_state.active() is False
    torch._C = ModuleType("torch._C")
    monkeypatch.setattr(kineto_state, "_find", lambda _torch: Functions())
    assert kineto_state.active() is True
