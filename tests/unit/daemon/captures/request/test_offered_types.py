"""Types that nobody knows are refused, with what is known of plug-ins."""

from typing import Any

import pytest
from kinetod.base.errors import InvalidRequest
from kinetod.captures.request.offered_types import check_known
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin


class Offering:
    """As much of an agent as is asked."""

    def __init__(self, *types: str) -> None:
        self._types = list(types)

    def activity_types(self) -> list[str]:
        return self._types


STACKS: Any = Offering("python_function")
ON = LoadedPlugin(name="toy", activity_types=("toy_kernel",))
REFUSED = LoadedPlugin(name="tin", refused="it is broken")


def problem(wanted: str, *known: LoadedPlugin) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_known([wanted], [STACKS], KnownPlugins(known=known))
    return caught.value.message


def test_types_of_plug_ins_are_known_wherever_their_accelerator_is() -> None:
    known = KnownPlugins(known=(ON,))
    assert known.activity_types == {"toy_kernel"}
    check_known(["toy_kernel", "kernel"], [STACKS, None], known)
    with pytest.raises(InvalidRequest):
        check_known(["toy_kernel", "kernel"], [STACKS, None])


def test_an_unknown_type_may_be_that_of_a_plug_in_that_is_not_used() -> None:
    assert problem("tin_zzz", ON, REFUSED) == (
        "spec.activity_types[0]: no source knows the activity type 'tin_zzz'; the selected processes offer "
        "python_function; the plug-in tin is not used: it is broken"
    )


def test_a_type_that_cannot_be_its_own_does_not_name_a_plug_in_that_is_not_used() -> None:
    assert problem("kernl", REFUSED).endswith("offer python_function")


def test_a_misspelling_is_guessed() -> None:
    assert "(did you mean python_function?)" in problem("python_functions")


def test_without_any_agent_nothing_is_checked() -> None:
    check_known(["tin_kernel"], [None])
    with pytest.raises(InvalidRequest):
        check_known(["tin_kernel"], [None, STACKS])
