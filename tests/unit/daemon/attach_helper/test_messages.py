import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinetod.attach_helper import messages

TARGET = messages.Target(7, 8)
APPROVED = messages.Approved(
    uids=(1000, 1000, 1000, 1000),
    gids=(1000, 1000, 1000, 1000),
    capabilities=2**63 - 1,
    dumpable=None,
    user_namespace=4026531837,
    executable=None,
    program="ab" * 32,
)
ATTACH = b'{"type":"attach","administrator":false,"approved":' + msgspec.json.encode(APPROVED) + b","
FOLDER, FILE = "kinetod-ffffffff-0123456789abcdef", "kinetod-c1-0123456789abcdef_7.json"
IN_FOLDER = b'{"type":"remove_folder","target":[7,8],"boot_time_ns":1,"name":"%s","file":"%s"}'
MESSAGES = [
    messages.Attach(target=TARGET, approved=APPROVED, administrator=True, boot_time_ns=1, deadline_ms=5),
    messages.Diagnose(target=TARGET, boot_time_ns=1, agent=messages.AgentFacts(state="READY")),
    messages.Look(targets=(TARGET,) * messages.MAX_PROCESSES, boot_time_ns=1),
    messages.Look(
        targets=(messages.Target(1 << 22, 2**63 - 1),) * messages.MAX_PROCESSES,
        boot_time_ns=1,
        signs=(
            messages.SignsItem("p" * 16, ("x" * 200,) * 16, ("X" * 200,) * 16, ()),
            messages.SignsItem("q", (), (), ()),
        ),
    ),
    messages.Search(targets=(TARGET,) * messages.MAX_PROCESSES, boot_time_ns=1),
    messages.Toolkit(target=TARGET, boot_time_ns=1),
    messages.DeviceCode(target=TARGET, boot_time_ns=1),
    messages.Kubelet(),
    messages.MakeFolder(
        target=TARGET,
        approved=APPROVED,
        administrator=False,
        boot_time_ns=1,
        file=FILE,
        until_s=2**32 - 1,
        only_try=True,
    ),
    *(
        kind(target=TARGET, boot_time_ns=1, name=FOLDER, file=FILE)
        for kind in (messages.LookIntoFolder, messages.OpenTraceFile, messages.RemoveFolder)
    ),
    messages.OpenPollSocket(served=(2**32 - 1,) * messages.MAX_SERVED),
]
HEAD = b"KATT\x07\x00"


@pytest.mark.parametrize("asked", MESSAGES, ids=lambda asked: type(asked).__name__)
def test_a_request_arrives_as_it_was_sent(asked: messages.Request) -> None:
    packet = messages.encode(asked)
    assert messages.request(packet) == asked
    assert len(packet) <= messages.MAX_REQUEST_BYTES


def test_the_largest_answers_fit_into_a_packet() -> None:
    facts = messages.PrivateFactsItem(
        pid=1 << 22,
        gpus=tuple(range(2**31 - 64, 2**31)),
        rank=2**31 - 1,
        world_size=2**31 - 1,
        job_id="é" * 128,
        job_step="é" * 32,
        is_python=True,
        framework="tensorflow",
        plugins=("p" * 16,) * messages.MAX_PLUGINS,
        own_user_namespace=True,
        uid=2**32 - 1,
        program="é" * 64,
        trace_parent="x" * 64,
        resource={f"a{number:02}": '"' * 29 for number in range(16)},  # 512 bytes, each value's to be escaped
    )
    tool = messages.Tool(pid=1 << 22, product="x" * 128, gpus=facts.gpus)
    for said in (
        messages.Seen(facts=(facts,) * messages.MAX_PROCESSES),
        messages.Found(searched=(1 << 22,) * messages.MAX_PROCESSES, tools=(tool,) * messages.MAX_TOOLS),
        messages.FolderMade(path="/" + "x" * 500 + "/" + FOLDER),
        messages.FolderSeen(writing_bytes=2**63 - 1, whole=True),
        messages.TraceFileReply(refused="é" * 1000),
        messages.FolderRemoved(),
        messages.PollSockets(inhabited=(2**32 - 1,) * 256, namespace=1, problem="é" * 1000),
    ):
        assert len(messages.encode(said)) <= messages.MAX_ANSWER_BYTES
        assert messages.answer(messages.encode(said)) == said


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (ATTACH.replace(b"[1000,", b"[-1,", 1) + b'"target":[7,8],"boot_time_ns":1,"deadline_ms":5}', "approved.uids"),
        (ATTACH.replace(b"[1000,", b"[", 1) + b'"target":[7,8],"boot_time_ns":1,"deadline_ms":5}', "length 4"),
        (b'{"type":"attach","target":[7,8],"boot_time_ns":1,"deadline_ms":5}', "approved"),
        (ATTACH + b'"target":[0,8],"boot_time_ns":1,"deadline_ms":5}', "target"),
        (ATTACH + b'"target":[7,-1],"boot_time_ns":1,"deadline_ms":5}', "target"),
        (ATTACH + b'"target":[7,8,9],"boot_time_ns":1,"deadline_ms":5}', "length 2"),
        (ATTACH + b'"target":[7,8],"boot_time_ns":1,"deadline_ms":60001}', "deadline_ms"),
        (ATTACH + b'"target":["7",8],"boot_time_ns":1,"deadline_ms":5}', "target"),
        (ATTACH + b'"target":[7,8],"boot_time_ns":1,"deadline_ms":5,"path":"/x"}', "path"),
        (b'{"type":"look","targets":[],"boot_time_ns":1}', "targets"),
        (
            b'{"type":"look","targets":['
            + b",".join([b"[7,8]"] * (messages.MAX_PROCESSES + 1))
            + b'],"boot_time_ns":1}',
            "targets",
        ),
        (IN_FOLDER % (b"..", FILE.encode()), "name"),
        (IN_FOLDER % (FOLDER.encode() + b"/..", FILE.encode()), "name"),
        (IN_FOLDER % (FOLDER.encode(), b"passwd"), "file"),
        (IN_FOLDER % (FOLDER.encode(), b"kinetod-/../x.json"), "file"),
        (IN_FOLDER % (FOLDER.encode(), FILE.encode() + b"\\n"), "file"),
        (b'{"type":"execute","target":[7,8]}', "execute"),
        (b'{"type":"attached","method":"x","stopped_ns":1,"latency_ns":1}', "attached"),
        (b"[" * 4000, "cannot be decoded"),
        (b"", "cannot be decoded"),
    ],
)
def test_what_is_out_of_bounds_or_unknown_is_no_request(body: bytes, why: str) -> None:
    with pytest.raises(messages.BadMessage, match=why):
        messages.request(HEAD + body)


def test_a_packet_that_is_too_long_is_not_even_read() -> None:
    with pytest.raises(messages.BadMessage, match="more than"):
        messages.request(HEAD + b" " * messages.MAX_REQUEST_BYTES)


def test_another_version_is_told_apart_from_nonsense() -> None:
    with pytest.raises(messages.WrongVersion, match="this side speaks version 7") as caught:
        messages.request(struct.pack("<4sH", b"KATT", 8) + b"whatever comes then")
    assert caught.value.theirs == 8


@given(st.binary(max_size=200))
def test_nothing_but_a_message_error_comes_of_any_bytes(data: bytes) -> None:
    for packet in (data, HEAD + data):
        with pytest.raises(messages.BadMessage):
            messages.request(packet)
