"""Totals of what a GPU's units did, and the shares between two of them."""

import pytest
from kinetod.gpus.gpu_types import GpuActivity, between


def test_shares_and_bytes_per_second_are_over_the_observed_time() -> None:
    before = GpuActivity(since_ns=7, seconds=10.0, totals={"sm_active": 4.0, "pcie_receive": 1000.0})
    now = GpuActivity(since_ns=7, seconds=14.0, totals={"sm_active": 5.0, "pcie_receive": 9000.0})
    assert between(before, now) == {"sm_active": 0.25, "pcie_receive": 2000.0}


def test_the_first_totals_are_since_the_first_sample() -> None:
    assert between(GpuActivity(since_ns=7), GpuActivity(since_ns=7, seconds=2.0, totals={"tensor_active": 1.0})) == {
        "tensor_active": 0.5
    }


def test_a_share_is_never_above_all_of_the_gpu() -> None:
    before = GpuActivity(since_ns=7, seconds=0.1, totals={"sm_active": 0.1})
    now = GpuActivity(since_ns=7, seconds=0.4, totals={"sm_active": 0.1 + 0.3 + 1e-9})
    assert between(before, now) == {"sm_active": 1.0}


NOW = GpuActivity(since_ns=7, seconds=4.0, totals={"sm_active": 4.0})


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, NOW),
        (NOW, None),
        (NOW, NOW),
        (GpuActivity(since_ns=6, seconds=1.0, totals={"sm_active": 1.0}), NOW),
    ],
    ids=["first reading", "not counted any more", "nothing observed in between", "another beginning"],
)
def test_totals_that_cannot_be_compared_give_nothing(before: GpuActivity | None, now: GpuActivity | None) -> None:
    assert between(before, now) == {}
