import json

from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.access.call_gate import what_is_asked


def test_every_condition_of_a_selector_can_be_written_to_the_audit_log() -> None:
    selector = pb.Selector(
        pids=[7],
        command_regex="x" * 600,
        user="ada",
        ranks=range(200),
        job_ids=["77"],
        gpus=[0],
        children=True,
        helpers=True,
        job_step="batch",
        pod_uids=["p"],
        container_ids=["c"],
    )
    assert len(selector.ListFields()) == len(selector.DESCRIPTOR.fields)
    for request in (
        pb.ListProcessesRequest(selector=selector),
        pb.CreateCaptureRequest(spec=pb.CaptureSpec(selector=selector)),
    ):
        asked = json.loads(json.dumps(what_is_asked(request)))["selector"]
        assert asked["helpers"] is True
        assert (len(asked["command_regex"]), len(asked["ranks"]), asked["gpus"]) == (500, 100, [0])
