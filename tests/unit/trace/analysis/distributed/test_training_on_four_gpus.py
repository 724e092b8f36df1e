"""Four ranks of a DDP job on four H200 (NVLink, NVLS off), traced by their job in one capture of 4 iterations.

Gradients go in buckets of 16,781,312 floats. Just before, the same program timed all-reduces of 64 MiB alone, as
nccl-tests does: 323.6 us, bus bandwidth 311.0 GB/s. Rank 2 came late on purpose, before each iteration.
"""

from pathlib import Path
from typing import Any

import kineto_trace as kt
import pytest

TRACES = sorted((Path(__file__).parents[4] / "data/h200/ddp4").glob("rank*.json.gz"))
ALONE_GB_S = 311.0  # bus bandwidth of 64 MiB without computation beside it


Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows() -> dict[str, Rows]:
    """The views over all four ranks."""
    names = ("collectives", "collective_summary", "stragglers")
    return {name: result.rows() for name, result in zip(names, kt.run_views(names, TRACES), strict=True)}


def test_every_collective_is_matched_over_all_ranks(rows: dict[str, Rows]) -> None:
    found = [(row["collective"], row["group_size"], row["ranks_seen"]) for row in rows["collectives"]]
    assert found == [("all_reduce", 4, 4)] * 49


def test_bus_bandwidth_is_that_of_nccl_alone_or_less_where_it_shares_the_gpu(rows: dict[str, Rows]) -> None:
    (total,) = rows["collective_summary"]
    assert 0.8 * ALONE_GB_S < total["busbw_gb_s"] < total["max_busbw_gb_s"] < 1.02 * ALONE_GB_S


def test_the_rank_that_comes_late_is_named(rows: dict[str, Rows]) -> None:
    assert rows["stragglers"][0]["rank"] == 2
    assert rows["collective_summary"][0]["last_rank"] == 2
