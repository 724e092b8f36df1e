"""One push of profiles: what each receiver gets, and what becomes of each answer."""

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from kineto_protos.pyroscope import push_pb2
from kineto_trace.store.parquet_folder import save_columns
from kinetod.config.addresses import ProfileForm
from kinetod.hooks import profile_sender
from kinetod.hooks.http_post import ReceiverAnswer
from kinetod.hooks.profile_payload import payload
from kinetod.hooks.profile_sender import ProfileDelivery, deliver, main
from kinetod.sandbox import landlock
from kinetod.supervise import child
from support.peers.certificates import Authority
from support.profiles import pprof
from support.profiles.receiver import ProfileReceiver, grpc_receiver, http_receiver, secret_file
from support.profiles.small_trace import profiled
from support.trace_files.traces import trace
from support.waiting import scaled

TARGETS = ["1-9", "2-9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of two targets with a trace, and one whose trace is gone."""
    path = tmp_path_factory.mktemp("capture")
    for pid in (1, 2):
        save_columns(profiled(pid=pid), path / "targets" / f"{pid}-9" / "columns")
    (path / "targets" / "3-9").mkdir()
    return path


@pytest.fixture(scope="module")
def otlp() -> Iterator[ProfileReceiver]:
    with http_receiver("otlp") as receiver:
        yield receiver


@pytest.fixture(scope="module")
def messages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the process that makes messages would say of each target."""
    path = tmp_path_factory.mktemp("messages")
    for name in TARGETS:
        message = payload(folder / "targets" / name, ProfileForm.OTLP_HTTP)
        (path / name).write_bytes(profile_sender.MADE + message)
    return path


@pytest.fixture
def made(messages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages are there already."""
    monkeypatch.setattr(child, "python", lambda _module, target, *_: ("/bin/cat", str(messages / Path(target).name)))


@pytest.fixture
def receiver(otlp: ProfileReceiver) -> ProfileReceiver:
    otlp.pushes.clear()
    otlp.statuses.clear()
    otlp.response.Clear()
    return otlp


def to(receiver: ProfileReceiver, folder: Path, targets: Sequence[str] = TARGETS, **more: Any) -> ProfileDelivery:
    how = {"timeout_s": scaled(30), **more}
    return ProfileDelivery(address=receiver.address, folder=str(folder), targets=list(targets), **how)


def sent(delivery: ProfileDelivery) -> tuple[ReceiverAnswer, list[str]]:
    output = io.StringIO()
    answer = deliver(delivery, output)
    return answer, [json.loads(line)["sent"] for line in output.getvalue().splitlines()]


def attributes(receiver: ProfileReceiver) -> list[dict[str, str]]:
    return [
        {each.key: each.value.string_value or str(each.value.int_value) for each in resource.resource.attributes}
        for push in receiver.pushes
        for resource in push.profiles.resource_profiles
    ]


def test_otlp_over_http_gets_one_request_for_each_target(receiver: ProfileReceiver, folder: Path) -> None:
    assert sent(to(receiver, folder)) == (
        ReceiverAnswer(),
        ["1-9", "2-9"],
    )
    assert {push.path for push in receiver.pushes} == {"/v1development/profiles"}
    assert {push.headers["content-type"] for push in receiver.pushes} == {"application/x-protobuf"}
    assert [each["process.pid"] for each in attributes(receiver)] == ["1", "2"]
    [scope] = receiver.pushes[0].profiles.resource_profiles[0].scope_profiles
    assert len(scope.profiles) == 8


def test_otlp_over_grpc_is_taken_by_opentelemetry_s_own_service(folder: Path, tmp_path: Path) -> None:
    headers = secret_file(tmp_path / "headers", "Authorization: Bearer t0ken\n")
    with grpc_receiver() as receiver:
        delivery = ProfileDelivery(
            address=receiver.address, folder=str(folder), targets=TARGETS, headers_file=str(headers),
            timeout_s=scaled(30),
        )  # fmt: skip
        assert sent(delivery) == (ReceiverAnswer(), ["1-9", "2-9"])
    assert [each["service.name"] for each in attributes(receiver)] == ["train.py", "train.py"]
    assert {push.headers["authorization"] for push in receiver.pushes} == {"Bearer t0ken"}


@pytest.mark.usefixtures("made")
def test_over_grpc_with_tls_the_receiver_s_certificate_is_checked(folder: Path, tmp_path: Path) -> None:
    authority = Authority("ours")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate)
    with grpc_receiver(authority) as receiver:
        delivery = to(receiver, folder, ca_file=str(ca))
        assert sent(delivery)[1] == ["1-9", "2-9"]
        ca.write_bytes(Authority("another").certificate)
        answer, names = sent(delivery)
        assert (answer.again, names) == (True, [])
        assert answer.text.startswith("target 1-9: answered UNAVAILABLE: ")
        ca.unlink()
        answer, _ = sent(delivery)
    assert (answer.again, answer.text.partition(" cannot be read")[0]) == (True, "target 1-9: the CA certificates")


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("code", "again"),
    [
        (grpc.StatusCode.UNAVAILABLE, True),
        (grpc.StatusCode.DATA_LOSS, True),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
        (grpc.StatusCode.UNIMPLEMENTED, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False),
    ],
)
def test_codes_of_grpc_are_tried_again_where_otlp_says_so(folder: Path, code: grpc.StatusCode, again: bool) -> None:
    with grpc_receiver() as receiver:
        receiver.statuses = [code]
        answer, names = sent(to(receiver, folder))
    assert (answer.again, names) == (again, [] if again else ["2-9"])
    assert answer.text == f"target 1-9: answered {code.name}: because"


def test_pyroscope_gets_pprof_profiles_by_subject_which_pprof_itself_reads(folder: Path, tmp_path: Path) -> None:
    with http_receiver("pyroscope") as receiver:
        assert sent(to(receiver, folder))[1] == ["1-9", "2-9"]
    push = receiver.pushes[0]
    assert (push.path, push.headers["content-type"]) == ("/push.v1.PusherService/Push", "application/proto")
    request = push_pb2.PushRequest.FromString(push.body)
    labels = [{label.name: label.value for label in series.labels} for series in request.series]
    assert [each.pop("__name__") for each in labels] == ["process_cpu", "host", "gpu"]
    assert labels[0] == {
        "service_name": "train.py",
        "host_name": "host",
        "process_pid": "1",
        "process_executable_name": "python",
        "process_runtime_version": "3.11.7",
        "kineto_capture_id": "cap",
        "kineto_job_id": "17",
        "kineto_rank": "3",
        "kineto_world_size": "8",
        "kineto_gpu_ids": "0",
        "kineto_gpu_models": "NVIDIA H100",
        "kineto_label_team": "vision",
    }
    path = tmp_path / "gpu.pb"
    path.write_bytes(request.series[2].samples[0].raw_profile)
    told = pprof.shown(path, "-top", "-unit=ns")
    assert re.search(r"^ +42ns .* gemm$", told, re.MULTILINE)


@pytest.mark.usefixtures("made")
def test_what_was_accepted_is_not_sent_again_and_a_passing_failure_stops_the_rest(
    receiver: ProfileReceiver, folder: Path
) -> None:
    delivery = to(receiver, folder)
    receiver.statuses = [200, 503]
    answer, names = sent(delivery)
    assert (answer.text, answer.again) == ("target 2-9: answered 503 Service Unavailable: because", True)
    assert sent(replace(delivery, sent=names)) == (ReceiverAnswer(), ["2-9"])
    assert [each["process.pid"] for each in attributes(receiver)] == ["1", "2", "2"]


@pytest.mark.usefixtures("made")
def test_a_target_that_is_refused_for_good_does_not_hold_up_the_others(receiver: ProfileReceiver, folder: Path) -> None:
    receiver.statuses = [400]
    answer, names = sent(to(receiver, folder))
    assert (answer.text, answer.again) == ("target 1-9: answered 400 Bad Request: because", False)
    assert names == ["2-9"]


@pytest.mark.usefixtures("made")
def test_profiles_that_a_receiver_rejects_though_it_accepts_the_request_are_a_failure(
    receiver: ProfileReceiver, folder: Path
) -> None:
    receiver.response.partial_success.rejected_profiles = 2
    receiver.response.partial_success.error_message = "too old"
    answer, names = sent(to(receiver, folder, sent=["2-9"]))
    assert answer == ReceiverAnswer(text="target 1-9: the receiver rejected 2 of its profiles: too old")
    assert names == []


@pytest.mark.usefixtures("made")
def test_headers_come_from_a_file_and_one_that_is_none_is_refused(
    receiver: ProfileReceiver, folder: Path, tmp_path: Path
) -> None:
    file = secret_file(tmp_path / "headers", "X-Scope-OrgID: team\n")
    delivery = to(receiver, folder, headers_file=str(file))
    sent(delivery)
    assert {push.headers["x-scope-orgid"] for push in receiver.pushes} == {"team"}
    file.write_text("no header")
    answer, _ = sent(delivery)
    text = f"the headers file {file} cannot be used: line 1 is not of the form `Name: value`"
    assert answer == ReceiverAnswer(text=text, again=True)


def test_a_trace_with_nothing_to_tell_is_done_without_a_request(receiver: ProfileReceiver, tmp_path: Path) -> None:
    save_columns(trace({}), tmp_path / "targets" / "1-9" / "columns")
    assert sent(to(receiver, tmp_path, ["1-9"])) == (
        ReceiverAnswer(),
        ["1-9"],
    )
    assert receiver.pushes == []


def test_a_damaged_trace_is_told_and_the_others_are_sent(receiver: ProfileReceiver, tmp_path: Path) -> None:
    for pid in (1, 2):
        save_columns(profiled(pid=pid), tmp_path / "targets" / f"{pid}-9" / "columns")
    (tmp_path / "targets" / "1-9" / "columns" / "kernel.parquet").write_bytes(b"nothing")
    answer, names = sent(to(receiver, tmp_path))
    assert answer.text.startswith("target 1-9: its profile cannot be created: ")
    assert (answer.again, names) == (False, ["2-9"])


@pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")
def test_the_process_that_reads_a_trace_can_read_nothing_else(
    receiver: ProfileReceiver, folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "targets" / "1-9"
    target.mkdir(parents=True)
    (target / "columns").symlink_to(folder / "targets" / "1-9" / "columns")  # of another capture
    answer, names = sent(to(receiver, tmp_path, ["1-9"]))
    assert answer.text.startswith("target 1-9: its profile cannot be created: ")
    assert (names, receiver.pushes) == ([], [])


def test_the_process_that_reads_a_trace_has_little_memory_and_no_way_around_it(
    receiver: ProfileReceiver, folder: Path
) -> None:
    answer, names = sent(to(receiver, folder, memory_bytes=1 << 20))
    assert answer.text.count("its profile cannot be created: ") == 2
    assert names == []


def test_a_message_that_takes_too_long_to_make_is_tried_again(
    receiver: ProfileReceiver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "python", lambda *_: ("/bin/sleep", "60"))
    answer, _ = sent(to(receiver, folder, timeout_s=0.2))
    assert (answer.text, answer.again) == ("target 1-9: creating its profile took too long; raise hooks.timeout", True)


def test_a_message_without_an_end_is_cut_off(
    receiver: ProfileReceiver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_sender, "MAX_PAYLOAD_BYTES", 1 << 20)
    monkeypatch.setattr(child, "python", lambda *_: ("/bin/sh", "-c", "printf +; cat /dev/zero"))
    answer, _ = sent(to(receiver, folder, sent=["2-9"]))
    assert answer == ReceiverAnswer(text="target 1-9: its profile is larger than 1 MiB")


def test_a_target_whose_files_are_gone_is_a_failure(receiver: ProfileReceiver, folder: Path) -> None:
    answer, names = sent(to(receiver, folder, ["3-9", "2-9"]))
    assert (answer, names) == (ReceiverAnswer(text="target 3-9: its files are no longer in the store"), ["2-9"])


@pytest.mark.usefixtures("made")
def test_standard_input_says_what_to_do_and_the_last_line_is_the_outcome(
    receiver: ProfileReceiver, folder: Path
) -> None:
    output = io.StringIO()
    asked = {"address": receiver.address, "folder": str(folder), "targets": TARGETS, "sent": ["1-9"]}
    assert main(io.BytesIO(json.dumps(asked).encode() + b"\n"), output) == 0
    assert [json.loads(line) for line in output.getvalue().splitlines()] == [
        {"sent": "2-9"},
        {"text": "", "again": False, "after_s": 0.0},
    ]
