"""A shadow of a method comes and goes; what the program does with the method meanwhile stays."""

from typing import Any, List

import pytest
from kineto_agent.system.class_hooks import MethodShadow


class Stepper:
    def step(self) -> str:
        return "the library's"


@pytest.fixture
def owner() -> Any:
    return type("Owner", (), {"step": vars(Stepper)["step"]})


def patched(owner: Any) -> Any:
    """Puts a function of the program's there, which calls what was there before."""
    before = vars(owner)["step"]

    def step(self: Any) -> str:
        return "the program's, around " + str(before(self))

    owner.step = step
    return step


def test_a_second_installation_keeps_what_the_program_has_put_there_since_the_first(owner: Any) -> None:
    told: List[Any] = []
    shadow = MethodShadow(owner, "step", told.append)
    shadow.install()
    shadow.remove()
    step = patched(owner)
    shadow.install()
    assert owner().step() == "the program's, around the library's"
    assert len(told) == 1
    shadow.remove()
    assert vars(owner)["step"] is step


def test_a_shadow_below_the_programs_function_goes_on_from_there(owner: Any) -> None:
    told: List[Any] = []
    shadow = MethodShadow(owner, "step", told.append)
    shadow.install()
    step = patched(owner)
    shadow.remove()
    assert owner().step() == "the program's, around the library's"
    assert told == []
    shadow.install()
    assert vars(owner)["step"] is step
    assert owner().step() == "the program's, around the library's"
    assert len(told) == 1


def test_a_shadow_that_the_program_has_taken_away_is_installed_again(owner: Any) -> None:
    told: List[Any] = []
    original = vars(owner)["step"]
    shadow = MethodShadow(owner, "step", told.append)
    shadow.install()
    patched(owner)
    shadow.remove()
    owner.step = original
    shadow.install()
    assert owner().step() == "the library's"
    assert len(told) == 1
    shadow.remove()
    assert vars(owner)["step"] is original
