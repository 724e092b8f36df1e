import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.lists.process_table import COLUMNS

POLLS, TRACES = pb.KinetoPolling(last_poll_ns=1), pb.KinetoPolling(last_poll_ns=1, tracing=True)


@pytest.mark.parametrize(
    ("process", "kineto", "agent"),
    [
        (pb.Process(agent_state=pb.AGENT_STATE_NONE), "-", "NONE"),
        (pb.Process(agent_state=pb.AGENT_STATE_NONE, kineto=POLLS), "polls", "KINETO"),
        (pb.Process(agent_state=pb.AGENT_STATE_READY, kineto=POLLS), "polls", "READY"),
        (pb.Process(agent_state=pb.AGENT_STATE_NONE, kineto=TRACES), "traces", "KINETO"),
    ],
)
def test_a_process_whose_libkineto_polls_shows_it(process: pb.Process, kineto: str, agent: str) -> None:
    cells = {column.title: column.cell(process) for column in COLUMNS}
    assert (cells["KINETO"], cells["AGENT"]) == (kineto, agent)
