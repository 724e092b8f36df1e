from collections.abc import Sequence

import pytest
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.plugin_refusals import explained
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin

PLUGINS = KnownPlugins(known=(LoadedPlugin(name="tin", refused="it is broken"), LoadedPlugin(name="toy")))
TIN = "; the plug-in tin is not used: it is broken"


@pytest.mark.parametrize(
    ("code", "missing", "more"),
    [
        ("NOTHING_TO_RECORD", [], TIN),
        ("NOTHING_TO_RECORD", ["kernel"], TIN),
        ("ACTIVITY_TYPE_UNAVAILABLE", ["cpu_op", "tin_runtime"], TIN),
        ("ACTIVITY_TYPE_UNAVAILABLE", ["cpu_op"], ""),
        ("ACTIVITY_TYPE_UNAVAILABLE", ["tinder_runtime"], ""),
        ("UNKNOWN_ACTIVITY_TYPE", ["kernel", "tin_zzz"], TIN),
        ("UNKNOWN_ACTIVITY_TYPE", ["kernel", "kernl"], ""),
        ("CUPTI_BUSY", ["kernel"], ""),
    ],
)
def test_a_verdict_names_the_plug_ins_that_might_have_recorded_what_is_missing(
    code: str, missing: Sequence[str], more: str
) -> None:
    ending = explained(Ending(EndState.FAILED, code, "it offers nothing"), PLUGINS, missing)
    assert ending.reason == "it offers nothing" + more


def test_other_verdicts_stay() -> None:
    assert explained(DONE, PLUGINS, ["kernel"]) == DONE
    nothing = Ending(EndState.FAILED, "NOTHING_TO_RECORD", "no source")
    assert explained(nothing, KnownPlugins(), []) == nothing
