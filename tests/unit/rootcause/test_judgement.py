"""How a finding is compared with what was planted."""

from typing import Any

from rootcause.causes import Cause
from rootcause.judgement import judge, without_neighbours
from rootcause.table import misses, row, summary

CAUSE = Cause(name="sleep", program="services", where="after_step", remedy="sleep")


def finding(title: str, advice: str, saving_pct: float) -> dict[str, Any]:
    return {"title": title, "advice": advice, "saving_pct": saving_pct, "finding": "x", "where": None, "op": None}


SLEEPS = finding("after_step waits", "remove the sleep", 30.0)


def test_a_finding_that_names_place_and_remedy_has_found_the_cause() -> None:
    verdict = judge(CAUSE, (30.0, [finding("other", "x", 40.0), SLEEPS]), (20.0, []))
    assert (verdict.place, verdict.predicted_pct, verdict.saving_is_right) == (2, 30.0, True)
    assert round(verdict.share_pct) == 33


def test_the_place_without_the_remedy_is_not_enough() -> None:
    assert judge(CAUSE, (30.0, [finding("after_step waits", "buy a GPU", 30.0)]), (20.0, [])).place == 0


def test_a_saving_that_is_far_from_the_measured_one_is_wrong() -> None:
    assert not judge(CAUSE, (100.0, [finding("after_step", "sleep", 10.0)]), (60.0, [])).saving_is_right


def test_a_control_with_a_claim_above_five_per_cent_is_told() -> None:
    verdict = judge(CAUSE, (30.0, []), (20.0, [SLEEPS, finding("small", "x", 4.9)]))
    assert verdict.false_claims == ("after_step waits 30 %",)
    assert "controls with a claim above 5 %: 1 of 1\n  services for sleep: after_step waits 30 %" in summary([verdict])


def test_a_row_has_times_share_prediction_and_rank() -> None:
    verdict = judge(CAUSE, (30.0, [SLEEPS]), (20.0, []))
    assert row(verdict) == "sleep                      30.0   20.0    33 %  30 %     1  after_step waits 30 %"


def test_a_miss_tells_its_first_three_findings_and_a_hit_tells_none() -> None:
    others = [finding(f"other {number}", "x", 40.0 - number) for number in range(4)]
    missed = judge(CAUSE, (30.0, [*others, SLEEPS]), (20.0, []))
    assert missed.place == 5
    assert misses(missed) == ["    1. other 0 40 %", "    2. other 1 39 %", "    3. other 2 38 %"]
    assert misses(judge(CAUSE, (30.0, [others[0], SLEEPS]), (20.0, []))) == []


def test_a_verdict_must_name_the_cause_where_the_first_finding_does() -> None:
    said = "after_step waits. Remove the sleep. That could save up to 9 ms a step (30 %, likely)."
    silent = "A step takes 30 ms on average. Remove the sleep."
    others = [finding("other", "x", 40.0), SLEEPS]
    verdicts = [
        judge(CAUSE, (30.0, found), (20.0, []), sentence)
        for found, sentence in (([SLEEPS], said), ([SLEEPS], silent), ([SLEEPS], ""), (others, silent))
    ]
    assert [(each.should_be_said, each.is_said) for each in verdicts] == [
        (True, True), (True, False), (False, False), (False, False),
    ]  # fmt: skip
    assert f"verdict names the cause where the first finding does: 1 of 2\n  not named: sleep: {silent}\n" in summary(
        verdicts
    )


def test_a_finding_of_a_trace_without_any_saving_is_told_without_one() -> None:
    assert judge(CAUSE, (30.0, [{**SLEEPS, "saving_pct": None}]), (20.0, [])).first == "after_step waits ? %"


def test_a_wait_for_a_processor_that_the_kernel_counted_too_is_the_neighbours_and_not_the_programs() -> None:
    waits = {**finding("no CPU", "look for other programs", 40.0), "finding": "no_processor"}
    assert without_neighbours([waits, SLEEPS], waited_pct=35.0) == [SLEEPS]
    assert without_neighbours([waits, SLEEPS], waited_pct=0.0) == [waits, SLEEPS]
