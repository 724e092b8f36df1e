"""Profiles of a real daemon's captures: what a receiver gets, and the ids by which it finds them beside traces."""

import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kineto_protos.pprof import profile_pb2
from kineto_protos.pyroscope import push_pb2
from kineto_protos.v1 import profiler_pb2 as pb
from support.profiles.receiver import ProfileReceiver, Push, grpc_receiver, http_receiver, secret_file
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.targets.programs import Program, program, ready_pids
from support.waiting import scaled, until

SECOND_NS = 10**9
SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TARGET = """
import itertools, sys, threading, time, kineto_agent
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
kineto_agent.start()
def train_step():
    return sum(range(2000))
print("ready", flush=True)
for step in itertools.count():
    train_step()
    if step % 500 == 0:
        time.sleep(0.01)
"""
SERVICE = f"""
import sys, threading, time, kineto_agent, torch
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
kineto_agent.start()
tensor = torch.randn(64, 64)
print("ready", flush=True)
while True:
    with torch.profiler.record_function("request traceparent={CALLER}"):
        tensor @ tensor
    time.sleep(0.001)
"""
VARIABLES = (
    f"TRACEPARENT={SPAN}",
    "OTEL_SERVICE_NAME=trainer",
    "OTEL_RESOURCE_ATTRIBUTES=deployment.environment.name=staging,team=a%20b",
)


@pytest.fixture(scope="module")
def receiver() -> Iterator[ProfileReceiver]:
    with grpc_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def daemon(receiver: ProfileReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    headers = secret_file(tmp_path_factory.mktemp("secret") / "headers", "authorization: Bearer t0ken-of-ours\n")
    environ = {
        "KINETOD_HOOKS_PROFILES": receiver.address,
        "KINETOD_HOOKS_PROFILES_HEADERS": str(headers),
        "KINETOD_METRICS_LISTEN": "127.0.0.1:0",
    }
    with running_daemon(environ=environ) as started:
        yield started


@pytest.fixture(scope="module")
def target(daemon: Daemon) -> Iterator[Program]:
    with program(["env", *VARIABLES, sys.executable, "-c", TARGET], daemon) as process:
        until(lambda: process.pid in ready_pids(daemon.stub()), "the agent is connected")
        yield process


def capture(daemon: Daemon, pid: int, key: str = "", **metadata: str) -> pb.Capture:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=SECOND_NS)
    request = pb.CreateCaptureRequest(spec=spec, idempotency_key=key)
    created = daemon.stub().CreateCapture(request, timeout=10, metadata=tuple(metadata.items()))
    return watch_to_end(daemon.stub(), created.id)


def pushed(daemon: Daemon, receiver: ProfileReceiver, ended: pb.Capture) -> list[Push]:
    """The pushes of a capture, once there is one."""

    def found() -> list[Push]:
        return [
            push
            for push in receiver.pushes
            for resource in push.profiles.resource_profiles
            if attributes(resource.resource.attributes)["kineto.capture.id"] == ended.id
        ]

    until(found, "the profiles are here", state=daemon.log)
    return found()


@pytest.fixture(autouse=True)
def _all_are_pushed(daemon: Daemon, receiver: ProfileReceiver) -> Iterator[None]:
    """Afterwards the profiles of the test have come, so that the next one sees its own."""
    yield
    for ended in daemon.stub().ListCaptures(pb.ListCapturesRequest(), timeout=scaled(10)).captures:
        pushed(daemon, receiver, ended)


def calls(daemon: Daemon, result: str) -> float:
    """How often the hook was called with this result."""
    found = re.search(rf'^kineto_hook_calls_total{{hook="profiles",result="{result}"}} (.*)$', metrics(daemon), re.M)
    return float(found[1]) if found else 0.0


def metrics(daemon: Daemon) -> str:
    found = re.search(r"metrics on (http://127\.0\.0\.1:\d+/metrics)", daemon.log())
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=10) as answer:
        return str(answer.read(), "utf-8")


def attributes(found: Any) -> dict[str, str]:
    return {each.key: each.value.string_value or str(each.value.int_value) for each in found}


def test_a_capture_s_profiles_come_with_the_process_s_own_resource_and_span(
    daemon: Daemon, target: Program, receiver: ProfileReceiver
) -> None:
    before = {result: calls(daemon, result) for result in ("ok", "failed")}
    receiver.statuses = [grpc.StatusCode.UNAVAILABLE]  # the first try: the push is made again
    ended = capture(daemon, target.pid, traceparent=CALLER)
    until(lambda: len(pushed(daemon, receiver, ended)) == 2, "the second try", state=daemon.log)
    push = receiver.pushes[-1]
    assert push.headers["authorization"] == "Bearer t0ken-of-ours"
    assert "t0ken-of-ours" not in daemon.log()
    assert f"hook {receiver.address} of capture {ended.id}, attempt 1: target {target.pid}-" in daemon.log()
    until(lambda: calls(daemon, "ok") == before["ok"] + 1, "the push is counted", state=daemon.log, pause_s=0.2)
    assert calls(daemon, "failed") == before["failed"] + 1
    [resource] = push.profiles.resource_profiles
    known = attributes(resource.resource.attributes)
    assert known["service.name"] == "trainer"
    assert known["deployment.environment.name"] == "staging"
    assert known["team"] == "a b"
    assert known["process.pid"] == str(target.pid)
    assert known["kineto.capture.id"] == ended.id
    assert known["kineto.label.traceparent"] == CALLER
    words = push.profiles.dictionary
    profiles = {
        words.string_table[each.sample_type.type_strindex]: each for each in resource.scope_profiles[0].profiles
    }
    samples = profiles["cpu"].samples
    names = {words.string_table[function.name_strindex] for function in words.function_table}
    assert "train_step" in names
    assert {words.link_table[each.link_index].trace_id.hex() for each in samples} == {SPAN.split("-")[1]}
    # As much of the second as a busy machine gave it; in microseconds a whole one would not be as much.
    assert 10**6 < sum(value for each in samples for value in each.values) < 2 * SECOND_NS


def test_the_process_s_span_and_the_caller_s_are_in_the_capture(daemon: Daemon, target: Program) -> None:
    ended = capture(daemon, target.pid, traceparent=CALLER)
    [traced] = ended.targets
    assert traced.process.trace_parent == SPAN
    assert traced.process.resource["service.name"] == "trainer"
    assert ended.spec.labels["traceparent"] == CALLER


def test_the_same_request_with_another_span_is_the_same_request(daemon: Daemon, target: Program) -> None:
    first = capture(daemon, target.pid, key="k1", traceparent=CALLER)
    again = capture(daemon, target.pid, key="k1", traceparent=SPAN)
    assert (again.id, again.spec.labels["traceparent"]) == (first.id, CALLER)


def test_a_traceparent_that_is_none_is_ignored(daemon: Daemon, target: Program) -> None:
    assert "traceparent" not in capture(daemon, target.pid, traceparent="00-zz").spec.labels


@pytest.mark.torch
def test_work_in_an_annotation_that_names_a_span_is_linked_to_it(
    daemon: Daemon, receiver: ProfileReceiver, tmp_path: Path
) -> None:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    with program(["env", *VARIABLES, sys.executable, str(script)], daemon) as process:
        until(lambda: process.pid in ready_pids(daemon.stub()), "the agent is connected")
        spans = until(lambda: matrix_products(daemon, receiver, process.pid) - BEGUN_BEFORE, "one begins and ends")
    assert spans == {(True, CALLER.split("-")[2])}


# In an annotation that began before the recording: on a busy machine that may be all that there is.
BEGUN_BEFORE = {(False, SPAN.split("-")[2])}


def matrix_products(daemon: Daemon, receiver: ProfileReceiver, pid: int) -> set[tuple[bool, str]]:
    """Of those that a capture has: whether they are in an annotation, and the span that they are linked to."""
    found = pushed(daemon, receiver, capture(daemon, pid))[-1].profiles
    words = found.dictionary
    texts = words.string_table
    [host] = [
        each
        for each in found.resource_profiles[0].scope_profiles[0].profiles
        if texts[each.sample_type.type_strindex] == "host_time"
    ]
    spans = set()
    for sample in host.samples:
        places = [words.location_table[number] for number in words.stack_table[sample.stack_index].location_indices]
        names = [texts[words.function_table[place.lines[0].function_index].name_strindex] for place in places]
        if names[0] == "aten::mm":
            spans.add(("request" in names, words.link_table[sample.link_index].span_id.hex()))
    return spans


def test_pyroscope_gets_samples_of_the_process(daemon: Daemon) -> None:
    with http_receiver("pyroscope") as receiver:
        environ = {"KINETOD_HOOKS_PROFILES": receiver.address}
        with running_daemon(environ=environ) as other:
            with program(["env", *VARIABLES, sys.executable, "-c", TARGET], other) as process:
                until(lambda: process.pid in ready_pids(other.stub()), "the agent is connected")
                capture(other, process.pid)
            until(lambda: receiver.pushes, "the profiles are here", state=other.log)
    [series] = [
        each
        for each in push_pb2.PushRequest.FromString(receiver.pushes[0].body).series
        if {label.name: label.value for label in each.labels}["__name__"] == "process_cpu"
    ]
    assert {label.name: label.value for label in series.labels}["service_name"] == "trainer"
    found = profile_pb2.Profile.FromString(series.samples[0].raw_profile)
    assert "train_step" in found.string_table
