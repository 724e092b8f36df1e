from collections.abc import Mapping

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.attach.attach_types import Finding, Status
from kinetod.kineto_ipc.door_findings import ABSTRACT, DoorState, KinetoStart, of_host, of_process

OWN, INSIDE, OTHER = 4026531840, 4026532555, 4026532999
TAKEN = {ABSTRACT: "process 7 (dynolog) is using it; stop that process, or set dynolog.ipc = false"}


def door(*served: str, problems: Mapping[str, str] = {}, processes: int = 0) -> DoorState:
    return DoorState(
        served=served, own_namespace=OWN, namespaces=frozenset({INSIDE}), problems=problems, processes=processes
    )


def test_a_host_whose_polls_are_not_answered_has_nothing_to_say() -> None:
    assert list(of_host(None)) == []


def test_a_host_says_where_polls_are_answered_and_where_not() -> None:
    assert list(of_host(door("/run/ipc", problems=TAKEN, processes=1))) == [
        Finding("libkineto", Status.PROBLEM, f"polls are not answered at {ABSTRACT}: {TAKEN[ABSTRACT]}"),
        Finding(
            "libkineto", Status.OK, "1 process polls; polls are answered at /run/ipc, and in 1 other network namespace"
        ),
    ]
    state = DoorState(served=(ABSTRACT,), namespace_problems={OTHER: "process 9 uses @dynolog there", INSIDE: "else"})
    assert list(of_host(state)) == [
        Finding("libkineto", Status.OK, f"0 processes poll; polls are answered at {ABSTRACT}"),
        Finding(
            "libkineto",
            Status.NOTE,
            f"polls are not answered in 2 other network namespaces; in namespace {OTHER}: process 9 uses @dynolog "
            "there",
        ),
    ]


def test_a_queue_that_is_shorter_than_those_who_poll_are_many_is_noted() -> None:
    enough, short = (DoorState(served=(ABSTRACT,), processes=count, queue_length=10) for count in (10, 11))
    assert [found.status for found in of_host(enough)] == [Status.OK]
    _, note = of_host(short)
    assert (note.status, note.advice) == (
        Status.NOTE, "set net.unix.max_dgram_qlen to 512 (`sysctl`) and restart kinetod",
    )  # fmt: skip
    assert note.detail.startswith("11 processes poll, but the kernel queues only 10 datagrams per socket: ")


def test_a_process_that_polls_says_when_it_did() -> None:
    process = pb.Process(kineto=pb.KinetoPolling(last_poll_ns=10**9))
    (found,) = of_process(process, None, door(ABSTRACT), 3_500_000_000)
    assert (found.status, found.detail) == (Status.OK, "its libkineto polls this daemon (last poll: 2.5 s ago)")
    process.kineto.tracing = True
    (found,) = of_process(process, None, door(ABSTRACT), 3_500_000_000)
    assert found.detail.endswith("2.5 s ago), and its profiler is armed or recording")


def test_a_process_without_the_variable_says_nothing() -> None:
    assert list(of_process(pb.Process(), None, door(ABSTRACT), 0)) == []


@pytest.mark.parametrize(
    ("start", "state", "why", "advice"),
    [
        (KinetoStart(), None, "dynolog.ipc is off", "set dynolog.ipc = true"),
        (KinetoStart(), door(problems=TAKEN), f"polls are not answered at {ABSTRACT}: process 7", "`kinetoctl doctor`"),
        (KinetoStart(net_namespace=OWN), door(ABSTRACT), "it has not loaded libtorch yet", "wait until"),
        (KinetoStart(net_namespace=OTHER), door(ABSTRACT), "it has its own network namespace", "wait about 15 s"),
        (KinetoStart(net_namespace=INSIDE), door(ABSTRACT), "it has not loaded libtorch yet", "wait until"),
        (
            KinetoStart(net_namespace=OTHER),
            DoorState(namespace_problems={OTHER: "process 9 uses @dynolog there"}),
            "it has its own network namespace (process 9 uses @dynolog there)",
            "wait about 15 s",
        ),
        (KinetoStart(folder="/ipc/"), door(ABSTRACT), "it looks for the daemon in /ipc, which is not", "if /ipc is"),
        (KinetoStart(folder="/ipc/"), door("/ipc"), "it has not loaded libtorch yet", "wait until"),
        (
            KinetoStart(folder="/ipc", net_namespace=OTHER),
            door(problems={"/ipc": "no such folder"}),
            "polls are not answered at /ipc: no such folder",
            "`kinetoctl doctor`",
        ),
    ],
)
def test_a_process_that_does_not_poll_says_the_likely_cause(
    start: KinetoStart, state: DoorState | None, why: str, advice: str
) -> None:
    (found,) = of_process(pb.Process(), start, state, 0)
    beginning = f"started with KINETO_USE_DAEMON, but it does not poll this daemon: {why}"
    assert (found.status, found.detail[: len(beginning)]) == (Status.NOTE, beginning)
    assert found.advice.startswith(advice)
