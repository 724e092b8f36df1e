"""Where steps end on the device, and which ones are dropped. Times in µs."""

import numpy as np
import pytest
from kineto_trace.analysis.overview.step_ranges import DeviceLaunches, StepRanges, on_device


def steps_of(*ranges: tuple[int, int]) -> StepRanges:
    low, high = (np.array([step[side] for step in ranges], np.int64) for side in (0, 1))
    return StepRanges(tuple(str(n) for n in range(len(ranges))), low, high, np.zeros(len(ranges), np.int64))


def launches_of(*rows: tuple[int, int, int, int]) -> DeviceLaunches:
    """(start and end of the call, start and end of the device event); a call at 0-0 is none."""
    columns = [np.array([row[place] for row in rows], np.int64) for place in range(4)]
    call = np.where(columns[1] > 0, np.arange(len(rows)), -1)
    return DeviceLaunches(columns[0], columns[1], call, columns[2], columns[3])


def ranges(found: StepRanges) -> list[tuple[int, int]]:
    return list(zip(found.start.tolist(), found.end.tolist(), strict=True))


def test_a_step_ends_with_what_it_launched_and_the_next_one_starts_there() -> None:
    found = on_device(steps_of((0, 100), (100, 200)), launches_of((10, 12, 50, 130), (110, 112, 140, 180)))
    assert ranges(found) == [(0, 130), (130, 200)]
    assert found.launched.tolist() == [1, 1]


def test_a_step_that_is_over_before_it_starts_has_no_length() -> None:
    found = on_device(steps_of((0, 100), (100, 200), (200, 300)), launches_of((10, 12, 50, 250), (210, 212, 260, 320)))
    assert ranges(found) == [(0, 250), (250, 250), (250, 320)]


def test_a_call_across_a_border_belongs_to_no_step() -> None:
    found = on_device(
        steps_of((0, 100), (100, 200)), launches_of((95, 105, 110, 500), (10, 11, 20, 30), (110, 111, 120, 130))
    )
    assert ranges(found) == [(0, 100), (100, 200)]


def test_the_first_step_starts_when_earlier_work_is_over() -> None:
    launched = launches_of((0, 0, 10, 40), (0, 0, 45, 60), (20, 22, 50, 90))
    assert ranges(on_device(steps_of((30, 100)), launched)) == [(30, 100)]  # its call begins before it
    launched = launches_of((0, 0, 10, 40), (0, 0, 45, 60), (32, 33, 50, 90))
    assert ranges(on_device(steps_of((30, 100)), launched)) == [(40, 100)]  # the event until 60 ends after 50


@pytest.mark.parametrize(
    ("events", "kept"),
    [((5, 4, 0), 2), ((5, 5, 4), 3), ((5, 5, 3), 2), ((5, 3, 0), 1), ((1,), 1)],
)
def test_last_steps_that_may_be_incomplete_are_dropped(events: tuple[int, ...], kept: int) -> None:
    host = steps_of(*((100 * step, 100 * step + 100) for step in range(len(events))))
    rows = [
        (100 * step + 10 + number, 100 * step + 11 + number, 100 * step + 50, 100 * step + 60)
        for step, count in enumerate(events)
        for number in range(count)
    ]
    found = on_device(host, launches_of(*rows))
    assert found.name == host.name[:kept]
    assert found.dropped == host.name[kept:]


def test_without_launches_steps_stay_as_the_host_saw_them() -> None:
    host = steps_of((0, 100), (100, 150))
    assert on_device(host, launches_of((0, 0, 10, 500))) is host
