from array import array

from gpu.zoo import figures, report
from gpu.zoo.captures import Capture
from gpu.zoo.figures import Memory, Row

SECOND = 1_000_000_000


def recorded(begin_s: float, end_s: float) -> Capture:
    """A capture with the defaults whose request lies 0.1 s before its window, its file 0.1 s after it."""
    begin, end = int(begin_s * SECOND), int(end_s * SECOND)
    return Capture(
        kind="", verdict="DONE", kernels=7, begin_ns=begin, end_ns=end, requested_ns=begin - SECOND // 10,
        stored_ns=end + SECOND // 10,
    )  # fmt: skip


def test_a_median_counts_iterations_that_lie_wholly_in_a_window() -> None:
    times = array("q", [0, 1_000_000, 2_000_000, 9_000_000, 10_000_000, 12_000_000])
    assert figures.median_ms(times, [(0, 2_000_000), (9_500_000, 12_000_000)]) == 1.0
    assert figures.median_ms(times, [(20_000_000, 30_000_000)]) == 0.0


def test_iterations_are_timed_before_during_and_after_the_captures() -> None:
    slow = array("q", range(10 * SECOND, 12 * SECOND, 4_000_000))
    times = array("q", range(0, 10 * SECOND, 2_000_000)) + slow + array("q", range(12 * SECOND, 20 * SECOND, 3_000_000))
    row = Row(name="x")
    figures.time_iterations(row, times, [recorded(10, 11), recorded(11.2, 12)], 0, times)
    assert (row.before_ms, row.during_ms, row.after_ms) == (2.0, 4.0, 3.0)
    assert row.ratio == row.twin_ratio == 1.5


def test_an_untouched_run_of_before_is_looked_at_over_the_same_time_since_its_begin() -> None:
    untouched = array("q", range(0, 10 * SECOND, 2_000_000)) + array("q", range(10 * SECOND, 20 * SECOND, 3_000_000))
    times = array("q", [100 * SECOND + time for time in untouched])
    row = Row(name="x")
    figures.time_iterations(row, times, [recorded(110, 111), recorded(111.2, 112)], 100 * SECOND, untouched)
    assert row.ratio == row.twin_ratio == 1.5


def test_the_longest_iteration_counts_where_it_overlaps_a_window_and_also_if_it_has_not_ended() -> None:
    times = array("q", [0, 1_000_000, 9_000_000, 10_000_000])
    windows = ((0, 1_000_000), (2_000_000, 3_000_000), (9_000_000, 10_000_000), (9_500_000, 40_000_000))
    assert [figures.longest_ms(times, window) for window in windows] == [1.0, 8.0, 1.0, 30.0]
    assert figures.longest_ms(times, (5, 5)) == 0.0


def test_gaps_are_told_beside_those_of_the_untouched_program() -> None:
    untouched = array("q", range(0, 20 * SECOND, 2_000_000))
    times = array("q", [time for time in untouched if not 10.5 <= time / SECOND <= 10.6])
    row = Row(name="x")
    figures.time_iterations(row, times, [recorded(10, 11)], 0, untouched)
    assert (row.gap_during_ms, row.twin_gap_during_ms, row.gap_after_ms, row.twin_gap_after_ms) == (
        104.0,
        2.0,
        2.0,
        2.0,
    )
    assert "104.0 (2.0)" in report.markdown([row], "one")


def test_a_program_that_stands_still_beside_captures_that_all_fail_is_harm() -> None:
    """They have no window, but a request and an end."""
    row = Row(name="one")
    times, untouched = array("q", [8 * SECOND, 10 * SECOND, 18 * SECOND]), array("q", [n * SECOND for n in range(20)])
    failed = Capture(kind="", verdict="FAILED", requested_ns=9 * SECOND, stored_ns=17 * SECOND)
    figures.time_iterations(row, times, [failed], 0, untouched)
    assert row.problems == ["stood still for 8.0 s, untouched 1.0 s"] * 2


def test_captures_that_only_the_traced_program_has_lost_are_harm() -> None:
    row = Row(name="x")
    figures.count_lost(row, [{"what": "RuntimeError"}], [{}])
    assert (row.state, row.lost) == ("unharmed", 1)
    figures.count_lost(row, [{"what": "RuntimeError"}], [])
    assert row.problems == ["lost 1 of its own captures, the first: RuntimeError"]


def test_digests_at_common_iterations_must_be_equal() -> None:
    row = Row(name="x")
    figures.compare_digests(row, {100: "a", 200: "b", 300: "c"}, {100: "a", 200: "b"})
    assert (row.state, row.compared) == ("unharmed", 2)
    figures.compare_digests(row, {100: "a", 200: "x"}, {100: "a", 200: "b"})
    assert row.problems == ["changed results: 1 of 2 digests differ, the first at iteration 200"]


def test_poorer_traces_of_its_own_are_harm() -> None:
    row = Row(name="x")
    figures.compare_own_traces(row, [1000, 995], [1000, 1001])
    assert row.state == "unharmed"
    figures.compare_own_traces(row, [1000, 0], [1000, 1001])
    assert row.problems == ["1 of 2 of its own traces are poorer: [0], untouched 1000 events"]


def test_own_traces_that_vary_without_us_too_prove_nothing() -> None:
    row = Row(name="x")
    figures.compare_own_traces(row, [1000, 500], [1000, 400, 1001])
    assert row.state == "unharmed"


def test_memory_may_not_grow_more_than_that_of_the_untouched_program() -> None:
    row = Row(
        name="x", memory={"settled": Memory(rss=1 << 30, gpu=5), "end": Memory(rss=(1 << 30) + (200 << 20), gpu=5)}
    )
    row.twin_memory = {"settled": Memory(rss=1 << 30), "end": Memory(rss=(1 << 30) + (190 << 20))}
    figures.judge_memory(row)
    assert row.state == "unharmed"
    row.twin_memory = {}
    figures.judge_memory(row)
    assert row.problems == ["resident memory grew by 200 MiB"]


def test_what_is_printed_last_is_read_to_its_end() -> None:
    rows = [Row(name=f"program_{number}", captures=65, verdicts={"DONE": 65}) for number in range(80)]
    for row in rows[:10]:
        row.harm("died with status -6 after capture 3", "word " * 400)
    text = report.compact(rows)
    assert len(text) <= report.MOST_CHARACTERS
    assert "80 programs, 5200 captures: 70 unharmed, 10 HARMED, 0 skipped, 0 not run" in text
    assert "HARMED program_9: died with status -6 after capture 3" in text


def test_the_table_tells_warnings_and_who_was_left_out() -> None:
    told = Row(name="a", warnings={"stays attached because of CUDA graphs": 3})
    table = report.markdown([told, Row(name="b", state="skipped", notes=["one GPU"])], "two")
    assert "* 3 times, warning: stays attached because of CUDA graphs" in table
    assert "## Skipped: 1\n* b: one GPU" in table
