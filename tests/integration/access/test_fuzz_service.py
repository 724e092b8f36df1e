"""A few hundred cases of `make campaign-fuzz-service`, always the same ones: every door of the service."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign.fuzz_service import DOORS
from fuzz.doors.loop import run

pytestmark = pytest.mark.slow

ROUNDS = {"raw": 12, "link": 60, "agent": 100, "calls": 60, "polls": 60}
SEED = 3


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:  # pytest's own are too long for socket paths
        yield Path(made)


@pytest.mark.parametrize("name", list(DOORS))
def test_damaged_input_is_refused_or_taken_and_nothing_breaks(folder: Path, name: str) -> None:
    with DOORS[name](folder) as door:
        report = run(door, seed=SEED, rounds=ROUNDS[name])
    assert report.done == sum(report.outcomes.values()) == ROUNDS[name]
    assert len(report.outcomes) > 1


@pytest.mark.parametrize("name", ["link", "agent"])
def test_a_case_is_the_same_whenever_it_is_made(folder: Path, name: str) -> None:

    with DOORS[name](folder) as door:
        made = [[door.case(random.Random(f"{SEED}-{number}")) for number in range(30)] for _ in range(2)]
    assert made[0] == made[1]
