"""Pyroscope's own client sends what we send: the same call, in messages of the same schema."""

import importlib.util
import subprocess
import sys

import pytest
from kineto_protos.pprof import profile_pb2
from kineto_protos.pyroscope import push_pb2
from support.profiles.receiver import http_receiver

CLIENT = """
import sys, time, pyroscope
pyroscope.configure(application_name="app", server_address=sys.argv[1], tags={"rank": "3"}, sample_rate=100)
end = time.monotonic() + 1
while time.monotonic() < end:
    sum(range(10000))
pyroscope.shutdown()
"""


@pytest.mark.slow
def test_a_push_of_pyroscope_s_client_is_read_by_our_schema() -> None:
    if importlib.util.find_spec("pyroscope") is None:
        pytest.skip("no Pyroscope client: pip install pyroscope-io")
    with http_receiver("pyroscope") as receiver:
        address = receiver.address.removeprefix("pyroscope+")
        subprocess.run([sys.executable, "-c", CLIENT, address], check=True, timeout=60)
    assert {push.path for push in receiver.pushes} == {"/push.v1.PusherService/Push"}
    assert {push.headers["content-type"] for push in receiver.pushes} == {"application/proto"}
    [series] = push_pb2.PushRequest.FromString(receiver.pushes[-1].body).series
    labels = {label.name: label.value for label in series.labels}
    assert (labels["__name__"], labels["service_name"], labels["rank"]) == ("process_cpu", "app", "3")
    found = profile_pb2.Profile.FromString(series.samples[0].raw_profile)
    texts = found.string_table
    assert [(texts[each.type], texts[each.unit]) for each in found.sample_type] == [("cpu", "nanoseconds")]
    assert (texts[found.period_type.type], texts[found.period_type.unit]) == ("cpu", "nanoseconds")
