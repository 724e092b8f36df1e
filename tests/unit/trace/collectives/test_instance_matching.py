"""Collectives without sequence numbers, matched by order and time: proved, or refused with the reason."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from kineto_trace.collectives.instance_matching import LEAST_PIECE, Lane, LaneMatch, match_lanes
from kineto_trace.collectives.rank_matching import MatchedCollectives, instances, match, rank_collectives
from support.trace_files.simulated.training_job import SimulatedJob, ddp, fsdp, simulate


def matched(job: SimulatedJob, seed: int = 0) -> MatchedCollectives:
    run = simulate(job, seed)
    return match([(rank, rank_collectives(run.context(rank))) for rank in range(job.ranks)])


def shared_wrongly(found: MatchedCollectives, job: SimulatedJob) -> int:
    """Counts instances whose members are not one collective in truth, which the order on the true clock tells."""
    wrong = 0
    for number in np.unique(found.instance).tolist():
        rows = np.flatnonzero(found.instance == number)
        wrong += int(np.ptp(found.end[rows]) > 1_000 * (job.jitter_us + 5))
    return wrong


@pytest.mark.parametrize("begin", [{}, {1: 0.03}, {0: 0.21}, {0: 0.3, 1: 0.02}])
@pytest.mark.parametrize("late", [{}, {1: 15_000.0}])
def test_windows_that_begin_at_different_collectives_are_matched_by_time(
    begin: dict[int, float], late: dict[int, float]
) -> None:
    job = fsdp(late=late, begin=begin)
    found = matched(job)
    seen = instances(found).seen
    assert shared_wrongly(found, job) == 0
    lengths = np.bincount(found.rank)
    assert (seen == 2).sum() == lengths.min()
    assert "by order and time" in found.notes[0]
    skew = instances(found).last_start - instances(found).start
    assert float(np.mean(skew[seen == 2])) < (2_500_000 if late else 500_000)


HOSTS = ("a", "b", "c", "d")
AHEAD = {1: 700.0, 2: -40_000.0}


def test_clocks_of_which_nothing_is_known_are_no_obstacle_if_ends_tell() -> None:
    job = ddp(late={2: 3_000}, hosts=HOSTS, clock_us=AHEAD, begin={3: 0.17}, steps=12, jitter_us=5.0)
    found = matched(job)
    assert (instances(found).seen == 4).sum() == np.bincount(found.rank).min()
    assert max(np.ptp(found.end[found.instance == number]) for number in range(int(found.instance.max()))) < 20_000


def test_measured_clocks_prove_the_match_where_ends_alone_cannot() -> None:
    clocks = {
        rank: {"clock_offset_ns": int(-1_000 * AHEAD.get(rank, 0) + 3_000 * rank), "clock_uncertainty_ns": 20_000}
        for rank in range(4)
    }
    job = ddp(late={2: 3_000}, hosts=HOSTS, clock_us=AHEAD, begin={3: 0.17}, steps=12, clocks=clocks, jitter_us=60.0)
    found = matched(job)
    assert (instances(found).seen == 4).sum() == np.bincount(found.rank).min()
    assert "no other match is possible" in found.notes[0]


def test_a_loop_of_equal_steps_is_not_matched_without_clocks() -> None:
    # rank 1 counts its steps from where its window begins, as a process does whose steps somebody else counts
    job = ddp(ranks=2, hosts=("a", "b"), clock_us={1: 4_000_000.0}, begin={1: 0.3}, steps=12, jitter_us=30.0)
    found = matched(replace(job, recount=True))
    assert instances(found).seen.max() == 1
    assert "are not matched with other ranks: " in found.notes[0]
    assert "they can be matched in two ways" in found.notes[0]
    by_numbers = matched(job)
    assert (instances(by_numbers).seen == 2).sum() == np.bincount(by_numbers.rank).min()


def test_windows_that_do_not_overlap_are_not_matched() -> None:
    found = matched(fsdp(end={0: 0.4}, begin={1: 0.5}))
    assert instances(found).seen.max() == 1
    assert "no time offset makes their times consistent" in found.notes[0]


@pytest.mark.parametrize("lost", [[30], [30, 90], [10, 11, 12, 50]])
@pytest.mark.parametrize("late", [{}, {1: 5_000.0}])
def test_lost_records_cost_the_match_of_their_neighbours_only(lost: list[int], late: dict[int, float]) -> None:
    job = fsdp(late=late)
    run = simulate(job)
    first, second = (rank_collectives(run.context(rank)) for rank in range(2))
    rows = np.setdiff1d(np.arange(len(second)), lost)
    per_row = ("start", "end", "description", "sequence", "step", "launch", "stream", "compute_ns", "kernels")
    cut = replace(second, **{name: getattr(second, name)[rows] for name in per_row})
    found = match([(0, first), (1, cut)])
    assert shared_wrongly(found, job) == 0
    assert (instances(found).seen == 2).sum() >= len(rows) - 2 * LEAST_PIECE * len(lost)
    assert " without a counterpart on the other rank" in found.notes[0]


WITHOUT = (
    "collectives have no sequence number in the traces: they are matched across ranks by order and time. Their ends"
)
ALONE = "no other match is possible"
LATE = "; 1 window begins at a different collective than on the first rank"


@pytest.mark.parametrize(
    ("job", "note"),
    [
        (fsdp(), f"288 of 288 {WITHOUT} differ by 7.46 µs on average; {ALONE}"),
        (fsdp(begin={1: 0.03}), f"270 of 270 {WITHOUT} differ by 7.72 µs on average; {ALONE}{LATE}"),
        (
            ddp(late={2: 3_000}, hosts=HOSTS, clock_us=AHEAD, begin={3: 0.17}, steps=12, jitter_us=5.0),
            f"270 of 270 {WITHOUT} differ by 1.87 µs on average, and by 20.8 µs or more in any other match{LATE}",
        ),
    ],
    ids=["whole", "begins_late", "other_ways"],
)
def test_the_proof_is_told_with_what_speaks_against_it(job: SimulatedJob, note: str) -> None:
    assert matched(job).notes == [note]


def test_what_has_numbers_needs_no_proof() -> None:
    job = ddp(ranks=2, hosts=("a", "b"), clock_us={1: 4_000_000.0}, begin={1: 0.3}, numbered=True)
    found = matched(job)
    assert (instances(found).seen == 2).sum() == np.bincount(found.rank).min()
    assert not any("sequence number" in note for note in found.notes)


def test_many_collectives_are_matched_in_time_that_grows_with_their_number() -> None:
    random = np.random.default_rng(3)
    end = np.cumsum(random.integers(100_000, 900_000, 100_000))
    flags, name = np.ones(len(end), np.bool_), np.zeros(len(end), np.int64)
    lane = Lane(end - 50_000, end, name, name, flags)
    later = slice(700, None)
    other = Lane(lane.start[later], lane.end[later] + 7_000_000, name[later], name[later], flags[later])
    found = match_lanes(lane, other, float("inf"))
    assert isinstance(found, LaneMatch)
    assert (found.place.tolist(), found.residual_ns) == (list(range(700, 100_000)), 0.0)


US = 1_000


def lossy(seed: int, *, on_host: bool = False) -> tuple[Lane, Lane, npt.NDArray[np.int64]]:
    """Lanes of two ranks of which the first one waits in every collective, and the second one lost twelve records.

    Returns them, and of each collective of the second one its place in the first one.
    """
    random = np.random.default_rng(seed)
    end = np.cumsum(random.integers(1_900, 2_400, 364)) * US
    start = np.concatenate([[end[0] - 2_000 * US], end[:-1] + 2 * US])  # one after the other
    name, flags = np.zeros(len(end), np.int64), np.ones(len(end), np.bool_)
    left = np.setdiff1d(np.arange(len(end)), random.choice(len(end), 12, replace=False))
    ends = (end + (random.normal(0, 8, len(end)) * US).astype(np.int64))[left]
    other = Lane(ends - 160 * US, ends, name[left], name[left], flags[left], on_host)
    return Lane(start, end, name, name, flags, on_host), other, left


@pytest.mark.parametrize("seed", range(6))
def test_pairs_whose_ends_are_far_apart_are_refused_one_by_one(seed: int) -> None:
    reference, other, truth = lossy(seed)
    found = match_lanes(reference, other, 2_000)
    assert isinstance(found, LaneMatch)
    assert (found.place[found.fits] == truth[found.fits]).all()
    assert found.fits.sum() > 200
    assert found.residual_ns < 20 * US


def test_refused_pairs_are_counted() -> None:
    every = [match_lanes(*lossy(seed)[:2], 2_000) for seed in range(6)]
    assert sum(found.refused for found in every if isinstance(found, LaneMatch)) > 0


def test_collectives_of_the_host_are_not_refused_by_their_ends() -> None:
    reference, other, _ = lossy(0, on_host=True)
    found = match_lanes(reference, other, 2_000)
    assert isinstance(found, LaneMatch)
    assert found.refused == 0


def test_ends_that_differ_by_the_clocks_alone_refuse_nothing() -> None:
    reference, _, _ = lossy(0)
    start, end = reference.end + 8_840 * US, reference.end + 9_000 * US
    found = match_lanes(reference, replace(reference, start=start, end=end), float("inf"))
    assert isinstance(found, LaneMatch)
    assert (found.refused, int(found.fits.sum())) == (0, len(reference))
