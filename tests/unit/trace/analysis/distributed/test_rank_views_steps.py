from typing import Any

import pytest
from kineto_trace.analysis.distributed.rank_views import rank_step_table, rank_table
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import View
from support.trace_files.ranks import Event, context
from support.trace_files.training_ranks import Job, events_of


def over(view: View, ranks: list[list[Event]], **options: Any) -> Result:
    contexts = [context(events, rank=rank, size=len(ranks), host="gpu-0") for rank, events in enumerate(ranks)]
    return view.combine([(rank, view.partial(each, **options)) for rank, each in enumerate(contexts)])


@pytest.fixture(scope="module")
def ranks() -> list[list[Event]]:
    return events_of(Job(ranks=4, steps=3, late={1: 300.0}))


def test_each_step_of_each_rank_has_its_time_and_its_waiting(ranks: list[list[Event]]) -> None:
    rows = over(rank_step_table, ranks).rows()
    assert [(row["rank"], row["step"]) for row in rows] == [
        (rank, str(step)) for rank in range(4) for step in sorted({int(row["step"]) for row in rows})
    ]
    assert len(rows) == 12
    assert {row["rank"] for row in rows if row["waiting_us"] > 200} == {0, 2, 3}


def test_the_steps_of_a_rank_add_up_to_what_the_view_of_ranks_says(ranks: list[list[Event]]) -> None:
    rows = over(rank_step_table, ranks).rows()
    for rank in over(rank_table, ranks).rows():
        own = [row for row in rows if row["rank"] == rank["rank"]]
        assert sum(row["step_us"] for row in own) / len(own) == pytest.approx(rank["step_us"])
        assert sum(row["waiting_us"] for row in own) / len(own) == pytest.approx(rank["waiting_us"])
