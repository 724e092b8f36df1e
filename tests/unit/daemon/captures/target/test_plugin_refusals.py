import pytest
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.plugin_refusals import explained

REFUSALS = ["the plug-in tin is not used: it is broken"]


@pytest.mark.parametrize("code", ["NOTHING_TO_RECORD", "UNKNOWN_ACTIVITY_TYPE", "ACTIVITY_TYPE_UNAVAILABLE"])
def test_a_verdict_names_the_plug_ins_that_might_have_recorded_what_is_missing(code: str) -> None:
    ending = explained(Ending(EndState.FAILED, code, "it offers nothing"), REFUSALS)
    assert ending.reason == "it offers nothing; the plug-in tin is not used: it is broken"


def test_other_verdicts_stay() -> None:
    assert explained(DONE, REFUSALS) == DONE
    cupti = Ending(EndState.FAILED, "CUPTI_BUSY", "another profiler")
    assert explained(cupti, REFUSALS) == cupti
    nothing = Ending(EndState.FAILED, "NOTHING_TO_RECORD", "no source")
    assert explained(nothing, []) == nothing
