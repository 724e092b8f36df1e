"""Methods that are shadowed on their classes, beside others who do the same."""

import importlib
import sys
from pathlib import Path
from typing import Any, Callable, List, Tuple

import pytest
from kineto_agent.system.class_hooks import MethodShadow, ModuleHook, ModuleHooks

Watched = Tuple[Any, MethodShadow, List[str]]


def watched() -> Watched:
    """A class, the shadow of its method, and what was told."""

    class Library:
        def work(self) -> str:
            return "done"

        @classmethod
        def count(cls) -> str:
            return cls.__name__

    told: List[str] = []
    return Library, MethodShadow(Library, "work", lambda _args: told.append("after")), told


def over(method: Callable[[Any], str]) -> Callable[[Any], str]:
    """What another tool puts over a method."""
    return lambda self: f"over {method(self)}"


def test_what_was_put_there_between_two_installations_stays() -> None:
    owner, shadow, told = watched()
    shadow.install()
    shadow.remove()
    owner.work = theirs = over(owner.work)
    shadow.install()
    assert (owner().work(), told) == ("over done", ["after"])
    shadow.remove()
    assert vars(owner)["work"] is theirs


def test_a_method_that_was_put_back_is_shadowed_again() -> None:
    owner, shadow, told = watched()
    original = owner.work
    shadow.install()
    owner.work = over(owner.work)
    shadow.remove()
    owner.work = original
    shadow.install()
    assert (owner().work(), told) == ("done", ["after"])
    shadow.remove()
    assert vars(owner)["work"] is original


def test_a_shadow_below_somebody_elses_function_is_silent_until_it_is_installed_again() -> None:
    owner, shadow, told = watched()
    shadow.install()
    owner.work = theirs = over(owner.work)
    shadow.remove()
    assert (owner().work(), told) == ("over done", [])
    shadow.install()
    assert vars(owner)["work"] is theirs
    assert (owner().work(), told) == ("over done", ["after"])


def test_a_call_is_told_once_if_an_earlier_shadow_is_put_below_the_present_one() -> None:
    owner, shadow, told = watched()
    shadow.install()
    earlier = owner.work
    shadow.remove()
    owner.work = over(earlier)
    shadow.install()
    assert (owner().work(), told) == ("over done", ["after"])
    shadow.remove()
    assert (owner().work(), told) == ("over done", ["after"])


def test_classmethods_are_put_back_as_they_were() -> None:
    owner, _, told = watched()
    shadow, before = MethodShadow(owner, "count", lambda _args: told.append("count")), vars(owner)["count"]
    for _ in range(2):
        shadow.install()
        assert owner.count() == "Library"
        shadow.remove()
    assert (vars(owner)["count"], told) == (before, ["count", "count"])


def test_an_import_succeeds_even_if_its_module_cannot_be_hooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frozen_library.py").write_text("complete = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def refuse(_module: Any) -> None:
        raise TypeError("its classes are immutable")

    hooks = ModuleHooks({"frozen_library": ModuleHook("complete", refuse)})
    hooks.install()
    try:
        assert importlib.import_module("frozen_library").complete
    finally:
        hooks.withdraw()
        sys.modules.pop("frozen_library", None)
