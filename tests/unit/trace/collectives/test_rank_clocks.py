import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_trace.collectives.rank_clocks import (
    MIN_COLLECTIVES,
    TIMESTAMP_NS,
    Blocking,
    RankClock,
    align,
    blocking,
    clock_of,
    read_clocks,
)
from kineto_trace.collectives.rank_matching import rank_collectives
from kineto_trace.errors import FileError
from support.trace_files import ranks
from support.trace_files.merging import collectives, events_of

UNKNOWN = RankClock()


def errors(found: tuple[RankClock, ...], truth: list[int], reference: int) -> list[int]:
    """How far each rank is from where it belongs, relative to the reference."""
    apart = found[reference].offset_ns - truth[reference]
    return [clock.offset_ns - true - apart for clock, true in zip(found, truth, strict=True)]


OFFSETS = st.lists(st.integers(-(10**12), 10**12), min_size=2, max_size=6)


@settings(max_examples=60)
@given(OFFSETS, st.integers(0, 2**32), st.integers(8, 200), st.integers(0, 20_000), st.integers(0, 300_000))
def test_the_truth_is_within_the_uncertainty(
    truth: list[int], seed: int, count: int, jitter_ns: int, wait_ns: int
) -> None:
    found = collectives(np.random.default_rng(seed), truth, count, jitter_ns=jitter_ns, wait_ns=wait_ns)
    result = align(range(len(truth)), [UNKNOWN] * len(truth), found)
    for clock, error in zip(result.clocks[1:], errors(result.clocks, truth, 0)[1:], strict=True):
        assert clock.method == "collectives", result.notes
        assert clock.uncertainty_ns is not None
        assert abs(error) <= clock.uncertainty_ns
        assert abs(error) <= jitter_ns + TIMESTAMP_NS  # the ends are that close


@settings(max_examples=60)
@given(OFFSETS, st.integers(0, 2**32), st.integers(0, 100), st.integers(0, 100_000), st.data())
def test_what_was_measured_before_is_never_made_worse(
    truth: list[int], seed: int, count: int, margin: int, data: st.DataObject
) -> None:
    measured = [true + data.draw(st.integers(-margin, margin)) for true in truth]
    found = collectives(np.random.default_rng(seed), truth, count, jitter_ns=5_000, wait_ns=200_000)
    result = align(range(len(truth)), [RankClock(value, margin, "given") for value in measured], found)
    for place, error in enumerate(errors(result.clocks, truth, result.reference)):
        uncertainty = result.clocks[place].uncertainty_ns
        assert uncertainty is not None
        assert abs(error) <= uncertainty <= 2 * margin


def test_few_collectives_refine_nothing() -> None:
    found = collectives(np.random.default_rng(1), [0, 50_000], MIN_COLLECTIVES - 1, jitter_ns=0, wait_ns=0)
    result = align([3, 5], [UNKNOWN, RankClock(7)], found)
    assert result.clocks == (RankClock(0, 0), RankClock(7))
    assert result.uncertainty_ns is None
    assert "clocks of ranks 5 are not refined: they share fewer than 8 numbered" in result.notes[0]


def test_a_clock_that_drifts_contradicts_itself_and_stays_what_it_was() -> None:
    first, second = collectives(np.random.default_rng(1), [0, 0], 200, jitter_ns=0, wait_ns=0)
    drift = np.linspace(-2_000_000, 2_000_000, 200).astype(np.int64)
    result = align(
        [0, 1], [UNKNOWN, RankClock(7)], [first, Blocking(first.key, second.start + drift, second.end + drift)]
    )
    assert result.clocks[1] == RankClock(7)
    assert "contradict each other: no offset fits them all (the clocks may drift)" in result.notes[0]


def test_some_wrong_matches_do_not_count_and_many_are_a_contradiction() -> None:
    truth = [0, 123_456]
    first, second = collectives(np.random.default_rng(1), truth, 100, jitter_ns=1_000, wait_ns=50_000)

    def wrong(count: int) -> Blocking:
        moved = np.where(np.arange(100) < count, 40_000_000, 0)
        return replace_times(second, moved)

    def replace_times(found: Blocking, moved: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Blocking:
        return Blocking(found.key, found.start + moved, found.end + moved)

    result = align([0, 1], [UNKNOWN] * 2, [first, wrong(10)])
    assert (result.clocks[1].collectives, abs(result.clocks[1].offset_ns - truth[1]) < 2_000) == (90, True)
    refused = align([0, 1], [UNKNOWN] * 2, [first, wrong(11)])
    assert refused.clocks[1] == UNKNOWN
    assert "the ends of 11 of 100 collectives differ far more than those of the rest" in refused.notes[0]


def test_collectives_that_contradict_the_measured_uncertainty_refine_nothing() -> None:
    found = collectives(np.random.default_rng(1), [0, 10_000_000], 50, jitter_ns=0, wait_ns=0)
    given_ = [RankClock(0, 10, "given"), RankClock(0, 20, "given")]
    result = align([0, 1], given_, found)
    assert result.clocks == (RankClock(0, 0, "given"), RankClock(0, 30, "given"))
    assert "contradict the stated uncertainty of the offsets" in result.notes[0]


def test_ranks_of_other_groups_are_joined_over_ranks_that_share_with_both() -> None:
    truth = [0, 1_000_000, -5_000_000]
    left = collectives(np.random.default_rng(1), truth[:2], 50, jitter_ns=0, wait_ns=10_000)
    right = collectives(np.random.default_rng(2), truth[1:], 50, jitter_ns=0, wait_ns=10_000)
    both = [np.concatenate(pair) for pair in zip(left[1], right[0], strict=True)]
    order = np.argsort(both[0])
    middle = Blocking(*(column[order] for column in both))
    result = align([0, 1, 2], [UNKNOWN] * 3, [left[0], middle, right[1]])
    margins = [clock.uncertainty_ns or 0 for clock in result.clocks]
    assert 0 < margins[1] < margins[2]
    assert [abs(error) <= margin for error, margin in zip(errors(result.clocks, truth, 0), margins, strict=True)] == [
        True
    ] * 3


def test_the_rank_with_the_smallest_uncertainty_is_the_reference() -> None:
    clocks = [RankClock(1, 300, "trace"), RankClock(2, 100, "trace"), RankClock(3, 100, "trace"), RankClock(4)]
    result = align(range(4), clocks, None)
    assert result.reference == 1
    assert [clock.uncertainty_ns for clock in result.clocks] == [400, 0, 200, None]
    assert [clock.offset_ns for clock in result.clocks] == [1, 2, 3, 4]


def test_only_numbered_blocking_collectives_count() -> None:
    def found(name: str) -> Blocking:
        events = events_of(0, (0, 1))
        for event in events:
            if event.get("cat") == "kernel":
                event["args"]["Collective name"] = name
        return blocking(rank_collectives(ranks.context(events)))

    assert [len(found(name).key) for name in ("allreduce", "_allgather_base", "reduce_scatter", "barrier")] == [12] * 4
    assert [len(found(name).key) for name in ("broadcast", "send", "recv", "all_to_all")] == [0] * 4
    events = events_of(0, (0, 1))
    for event in events:
        event.get("args", {}).pop("Seq", None)
    assert len(blocking(rank_collectives(ranks.context(events))).key) == 0


def test_offsets_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "clocks.json"
    path.write_text(json.dumps({"0": {"offset_ns": 1500, "uncertainty_ns": 200}, "7": -3}))
    assert read_clocks(path) == {0: RankClock(1500, 200, "given"), 7: RankClock(-3, None, "given")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected an object like"),
        ("{", "is not valid JSON"),
        ('{"a": 1}', "expected a rank such as 3, got 'a'"),
        ('{"1": 1.5}', "rank 1: offset_ns: expected a whole number of nanoseconds, got 1.5"),
        ('{"1": {"offset_ns": 1, "uncertainty_ns": -1}}', "rank 1: uncertainty_ns: expected nanoseconds"),
        ('{"1": {"offset": 1}}', "rank 1: unknown key 'offset'"),
    ],
    ids=["list", "broken", "no-rank", "fraction", "negative", "unknown-key"],
)
def test_a_wrong_file_of_offsets_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "clocks.json"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_clocks(path)


def test_what_a_trace_says_of_its_clock_counts_if_it_is_a_number() -> None:
    assert clock_of(5, 3) == RankClock(5, 3, "trace")
    assert clock_of(5, None) == replace(RankClock(5), method="trace")
    assert (clock_of(None, 3), clock_of(True, 3), clock_of(1 << 62, 3)) == (UNKNOWN, UNKNOWN, UNKNOWN)


def test_ranks_of_the_host_of_the_reference_have_its_clock() -> None:
    found = collectives(np.random.default_rng(1), [0, 0, 70_000], 50, jitter_ns=9_000, wait_ns=90_000)
    result = align(range(3), [UNKNOWN] * 3, found, ["a", "a", "b"])
    assert result.clocks[1] == RankClock(0, TIMESTAMP_NS, "host")
    assert (result.clocks[2].method, result.notes) == ("collectives", ())
    measured = [RankClock(5, 400, "trace"), RankClock(5, 400, "trace"), RankClock(9, 400, "trace")]
    alone = align(range(3), measured, None, ["a", "a", "a"])
    assert [clock.uncertainty_ns for clock in alone.clocks] == [0, TIMESTAMP_NS, 800]


def test_hosts_of_one_name_with_different_clocks_are_found_out() -> None:
    found = collectives(np.random.default_rng(1), [0, 10_000_000], 50, jitter_ns=0, wait_ns=0)
    result = align([4, 6], [UNKNOWN] * 2, found, ["ubuntu", "ubuntu"])
    assert abs(result.clocks[1].offset_ns - 10_000_000) <= (result.clocks[1].uncertainty_ns or 0)
    assert result.clocks[1].method == "collectives"
    assert result.notes == (
        "rank 6 has the same host name as rank 4, but their collectives show that its clock is a different one",
    )


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_host_name_that_says_nothing_makes_no_clock_known(host: str) -> None:
    assert align([0, 1], [UNKNOWN] * 2, None, [host, host]).clocks[1] == UNKNOWN
