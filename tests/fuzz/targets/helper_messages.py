"""Packets between the front end and the attach helper: either may have been taken over by somebody."""

from collections.abc import Iterator

from kinetod.attach_helper import messages
from kinetod.processes.credentials import Credentials

TARGET = messages.Target(7, 8)
APPROVED = messages.Approved(
    uids=(1000,) * 4, gids=(1000,) * 4, capabilities=0, dumpable=True, user_namespace=4026531837, executable=(1, 2),
    program="ab" * 16,
)  # fmt: skip
FOLDER, FILE = "kinetod-6927f3a0-0123456789abcdef", "kinetod-c1-0123456789abcdef_7.json"
FACTS = messages.PrivateFactsItem(
    pid=7, gpus=(0, 1), rank=1, world_size=2, job_id="42", job_step="0", is_python=True, framework="torch",
    plugins=("pebble",), own_user_namespace=False, uid=1000, program="ab" * 16,
    trace_parent="00-" + "1" * 32 + "-" + "2" * 16 + "-01", resource={"service.name": "trainer"},
)  # fmt: skip


def play(data: bytes) -> None:
    try:
        asked = messages.request(data)
    except messages.BadMessage as exc:
        assert len(str(exc)) < 4000
    else:
        if isinstance(asked, messages.Attach):
            values = {name: getattr(asked.approved, name) for name in messages.Approved.__struct_fields__}
            Credentials.from_dict(values)
        assert messages.request(messages.encode(asked)) == asked
    try:
        said = messages.answer(data)
    except messages.BadMessage:
        return
    assert repr(messages.answer(messages.encode(said))) == repr(said)


def seeds() -> Iterator[bytes]:
    """One of each."""
    for message in (
        messages.Attach(target=TARGET, approved=APPROVED, administrator=True, boot_time_ns=1, deadline_ms=5),
        messages.Diagnose(target=TARGET, boot_time_ns=1, agent=messages.AgentFacts(state="READY")),
        messages.Look(
            targets=(TARGET,) * 3,
            boot_time_ns=1,
            signs=(messages.SignsItem("pebble", ("libpebble.so*",), ("PEBBLE_HOME",), ("/dev/pebble*",)),),
        ),
        messages.Search(targets=(TARGET,), boot_time_ns=1),
        messages.Toolkit(target=TARGET, boot_time_ns=1),
        messages.DeviceCode(target=TARGET, boot_time_ns=1),
        messages.Kubelet(),
        messages.OpenPollSocket(served=(4026532999,)),
        messages.MakeFolder(
            target=TARGET, approved=APPROVED, administrator=False, boot_time_ns=1, file=FILE, until_s=9, only_try=True
        ),
        messages.LookIntoFolder(target=TARGET, boot_time_ns=1, name=FOLDER, file=FILE),
        messages.OpenTraceFile(target=TARGET, boot_time_ns=1, name=FOLDER, file=FILE),
        messages.RemoveFolder(target=TARGET, boot_time_ns=1, name=FOLDER, file=FILE),
        messages.FolderMade(path=f"/tmp/{FOLDER}"),
        messages.FolderSeen(writing_bytes=None, whole=True),
        messages.TraceFileReply(refused="it is a link"),
        messages.FolderRemoved(),
        messages.PollSockets(inhabited=(4026532999, 4026533000), namespace=4026533000, problem=""),
        messages.AttachReply(method="pending-call", stopped_ns=5, latency_ns=6),
        messages.Diagnosed(diagnosis={"method": "x", "findings": []}),
        messages.Seen(facts=(FACTS,)),
        messages.Found(searched=(7,), tools=(messages.Tool(pid=7, product="Nsight", gpus=(0,)),)),
        messages.Tools(cupti="/usr/lib/libcupti.so.13", environ={"RANK": "1"}),
        messages.LaunchesReply(file="/usr/bin/x"),
        messages.RefusedReply(code="GONE", reason="it has ended"),
    ):
        yield messages.encode(message)
