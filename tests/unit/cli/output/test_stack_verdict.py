"""The verdict on a look at stacks: what it says, and that it says no more than was seen."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.stack_groups import ReadProcess, grouped
from kinetoctl.output.stack_verdict import listed, plural, verdicts
from support.service import stacks
from support.service.stacks import at_lock, gpu, in_collective, on_gpu, read, running

LOCK = "a lock in load_next_batch (train.py:6)"


def said(*found: pb.ProcessStacks, hosts: Sequence[str] = ()) -> str:
    names = hosts or [""] * len(found)
    return "\n".join(verdicts([ReadProcess(stacks=each, host=host) for each, host in zip(found, names, strict=True)]))


def ranks(*mains: pb.ThreadStack | None, world: int = 0) -> list[pb.ProcessStacks]:
    return [read(main, rank, world=world) for rank, main in enumerate(mains)]


@pytest.mark.parametrize(
    ("main", "sentence"),
    [
        (at_lock(), f"Process 4242 waits for {LOCK}."),
        (running(), "Process 4242 runs in train_step (train.py:20)."),
        (in_collective(), "Process 4242 waits in all_reduce (train.py:12)."),
        (stacks.thread("is stopped by SIGSTOP", pb.WAIT_STOPPED), "Process 4242 is stopped by SIGSTOP."),
        (stacks.thread("", pb.WAIT_UNSPECIFIED), "Process 4242 waits."),
        (
            stacks.thread("waits for data", pb.WAIT_NETWORK, stacks.library("recv", 0, "utils.py")),
            "Process 4242 waits for data in recv (torch/utils.py).",
        ),
        (None, "Process 4242 could not be read."),
    ],
)
@pytest.mark.parametrize("rank", [None, 0])
def test_one_process_is_named_by_its_pid(main: pb.ThreadStack | None, sentence: str, rank: int | None) -> None:
    assert said(read(main, rank)) == sentence


def test_a_rank_that_is_not_in_the_collective_of_the_others_is_named_with_its_place() -> None:
    assert said(*stacks.hanging(late=1)) == (
        f"Rank 1 is not in the all_reduce in which 7 ranks wait: it waits for {LOCK}."
    )


def test_late_ranks_are_named_up_to_three_and_counted_beyond() -> None:
    waiting = [in_collective()] * 2
    assert said(*ranks(*waiting, at_lock(), at_lock())) == (
        f"Ranks 2 and 3 are not in the all_reduce in which 2 ranks wait: they wait for {LOCK}."
    )
    assert said(*ranks(in_collective(), at_lock(), running())) == (
        "Ranks 1 and 2 are not in the all_reduce in which rank 0 waits: "
        f"rank 1 waits for {LOCK} and rank 2 runs in train_step (train.py:20)."
    )
    several = ranks(*[at_lock(), in_collective()] * 6)
    assert said(*several) == (
        f"6 ranks (0, 2, 4 and 3 more) are not in the all_reduce in which 6 ranks wait: they wait for {LOCK}."
    )


def test_ranks_that_wait_for_the_gpu_are_not_said_to_be_in_a_collective() -> None:
    assert said(*ranks(on_gpu(), at_lock(), *[on_gpu()] * 6)) == (
        f"7 ranks wait for the GPU, but rank 1 does not: it waits for {LOCK}."
    )
    assert said(*ranks(on_gpu(), at_lock(), in_collective())) == (
        f"2 ranks wait in all_reduce or for the GPU, but rank 1 does not: it waits for {LOCK}."
    )


def test_a_collective_without_a_name_is_not_taken_for_the_same_or_another_one() -> None:
    unknown = stacks.thread("waits for its collective", pb.WAIT_COLLECTIVE, stacks.frame("main", 12))
    assert said(*ranks(unknown, unknown, at_lock())) == (
        f"2 ranks wait in a collective, but rank 2 does not: it waits for {LOCK}."
    )
    assert said(*ranks(unknown, in_collective(), at_lock())).startswith(
        "2 ranks wait in a collective, but rank 2 does not"
    )


def test_the_name_of_a_collective_may_come_from_its_frame() -> None:
    named = in_collective("barrier")
    named.waits = "waits for the other ranks"
    assert said(*ranks(named, named, running())).startswith("Rank 2 is not in the barrier in which 2 ranks wait: it")


def test_where_all_wait_alike_no_rank_is_blamed() -> None:
    assert said(*ranks(*[in_collective()] * 8)) == (
        "All 8 ranks wait in all_reduce (train.py:12); no rank that was read is elsewhere."
    )
    assert said(*ranks(*[on_gpu()] * 2)) == (
        "Both ranks wait for the GPU in train_step (train.py:30); no rank that was read is elsewhere."
    )
    assert said(*ranks(in_collective(), in_collective(line=40), on_gpu())) == (
        "All 3 ranks wait in all_reduce or for the GPU, at train.py:12, train.py:40 and train.py:30; "
        "no rank that was read is elsewhere."
    )


def test_where_all_wait_for_gpus_it_is_said_what_these_do() -> None:
    idle, busy = gpu(), gpu(1, graphics_active=0.5)
    assert said(read(on_gpu(), gpus=[idle])) == (
        "Process 4242 waits for the GPU in train_step (train.py:30); its GPU is idle."
    )
    pair = [read(on_gpu(), rank, gpus=[each]) for rank, each in enumerate([idle, gpu(1)])]
    assert said(*pair).endswith("no rank that was read is elsewhere; the GPUs are idle.")
    pair[1].gpus[0].CopyFrom(busy)
    assert said(*pair).endswith("no rank that was read is elsewhere.")
    assert said(read(in_collective(), gpus=[idle])) == "Process 4242 waits in all_reduce (train.py:12)."


def test_ranks_that_are_missing_come_first_where_all_others_wait() -> None:
    read_ones = [each for each in ranks(*[in_collective()] * 8, world=8) if each.process.rank not in (3, 5)]
    assert said(*read_ones) == "Ranks 3 and 5 of 8 were not read; the other 6 wait in all_reduce (train.py:12)."
    assert said(*ranks(on_gpu(), on_gpu(), None, world=3)) == (
        "Rank 2 of 3 was not read; the other 2 wait for the GPU in train_step (train.py:30)."
    )
    assert said(read(in_collective(), 1, world=512)) == (
        "Ranks 0 and 2-511 of 512 were not read; process 4243 waits in all_reduce (train.py:12)."
    )


def test_ranks_that_are_missing_come_last_where_another_one_is_late() -> None:
    assert said(*ranks(in_collective(), at_lock(), world=3)).endswith("(train.py:6); rank 2 of 3 was not read.")


def test_a_world_size_that_contradicts_what_was_read_says_nothing() -> None:
    for found in (
        [read(on_gpu(), 0, world=2), read(on_gpu(), 1, world=9)],
        [read(on_gpu(), 0, world=2), read(on_gpu(), 7, world=2)],
        [read(on_gpu(), 0, pid=1, world=3), read(on_gpu(), -1, pid=2, world=3)],
        [read(on_gpu(), 0, pid=1, world=2), read(on_gpu(), 0, pid=2, world=2)],
    ):
        assert "not read" not in said(*found)


def test_ranks_in_different_collectives_are_told_apart() -> None:
    assert said(*ranks(in_collective(), *[in_collective("all_gather")] * 3)) == (
        "Ranks wait in different collectives: 0 in all_reduce and 1-3 in all_gather."
    )
    assert said(*ranks(in_collective(), in_collective("barrier"), running())).endswith(
        ": 0 in all_reduce and 1 in barrier; rank 2 runs in train_step (train.py:20)."
    )


def test_what_makes_process_groups_is_one_collective_however_deep_the_stack_was_read() -> None:
    joins = [
        stacks.in_c10d("waits for the other ranks to join (init_process_group)", "init_process_group"),
        stacks.in_c10d("waits for the other ranks to join (rendezvous)"),
        stacks.in_c10d("waits in barrier", "barrier", "new_group"),
        stacks.in_c10d("waits for the other ranks to join (new_group)", "_store_based_barrier", "new_group"),
    ]
    assert said(*ranks(*joins)) == "All 4 ranks wait in join, at train.py:12; no rank that was read is elsewhere."
    assert said(*ranks(*joins, at_lock())).startswith("Rank 4 is not in the join in which 4 ranks wait: it waits for a")
    assert said(*ranks(joins[0], in_collective())) == (
        "Ranks wait in different collectives: 0 in join and 1 in all_reduce."
    )


def test_a_collective_has_the_name_by_which_the_program_called_it() -> None:
    deep = stacks.in_c10d("waits in all_gather", "all_gather", "wrapper", "all_gather_object", "wrapper")
    shallow = stacks.in_c10d("waits in all_gather_object", "all_gather_object")
    assert said(*ranks(deep, shallow, running())).startswith("Rank 2 is not in the all_gather_object in which 2 ranks ")
    own = stacks.in_c10d("waits in all_gather", "all_gather")
    own.frames.append(stacks.library("barrier", 3, "distributed/distributed_c10d.py"))  # outside of the program's code
    assert said(*ranks(own, in_collective("all_gather"), running())).startswith("Rank 2 is not in the all_gather in ")
    qualified = stacks.in_c10d("waits in all_gather", "all_gather", "_logged.<locals>.wrapper")
    assert said(*ranks(qualified, in_collective("all_gather"), running())).startswith(
        "Rank 2 is not in the all_gather "
    )
    unseen = stacks.in_c10d("waits in all_gather")
    assert said(*ranks(unseen, in_collective("all_gather"), running())).startswith("Rank 2 is not in the all_gather in")


@pytest.mark.parametrize("pair", [("send", "recv"), ("isend", "irecv"), ("batch_isend_irecv", "recv_object_list")])
def test_ranks_that_send_and_receive_do_not_disagree(pair: tuple[str, str]) -> None:
    sends, receives = (in_collective(name) for name in pair)
    where = " or ".join(sorted(pair))
    assert said(*ranks(sends, receives)) == (
        f"Both ranks wait in {where}, at train.py:12; no rank that was read is elsewhere."
    )
    assert said(*ranks(sends, receives, running())) == (
        f"2 ranks wait in {where}, but rank 2 does not: it runs in train_step (train.py:20)."
    )
    assert said(*ranks(receives, receives, running())) == (
        f"2 ranks wait in {pair[1]}, but rank 2 does not: it runs in train_step (train.py:20)."
    )
    assert "different" not in said(*ranks(sends, in_collective()))
    assert said(*ranks(in_collective(), sends, in_collective("barrier"))) == (
        "Ranks wait in different collectives: 0 in all_reduce and 2 in barrier; "
        f"rank 1 waits in {pair[0]} (train.py:12)."
    )


def test_where_none_waits_for_others_the_few_come_before_the_many() -> None:
    assert said(*ranks(*[running()] * 3)) == "All 3 ranks run in train_step (train.py:20)."
    assert said(*ranks(running(), running(31))) == "Both ranks run; rank 0, for example, in train_step (train.py:20)."
    assert said(*ranks(running(), at_lock(), running(31))) == f"Rank 1 waits for {LOCK}, and 2 ranks run."
    assert said(*ranks(at_lock(), at_lock(), running())) == (
        f"Rank 2 runs in train_step (train.py:20), and 2 ranks wait for {LOCK}."
    )
    assert said(*ranks(*[at_lock()] * 3)) == f"All 3 ranks wait for {LOCK}."
    assert said(*ranks(at_lock(), running())) == (
        f"2 ranks are in different places: rank 0 waits for {LOCK} and rank 1 runs in train_step (train.py:20)."
    )


ENDED = stacks.thread("has ended", pb.WAIT_NONE, state=pb.THREAD_STATE_ENDED)


def test_a_process_that_has_ended_is_not_one_that_runs() -> None:
    assert said(*ranks(running(), ENDED, running(31))) == "Rank 1 has ended, and 2 ranks run."
    assert said(*ranks(ENDED, running())) == (
        "2 ranks are in different places: rank 0 has ended and rank 1 runs in train_step (train.py:20)."
    )
    assert said(*ranks(ENDED, ENDED)) == "Both ranks have ended."
    wordless = stacks.thread("", pb.WAIT_NONE, state=pb.THREAD_STATE_ENDED)
    assert said(*ranks(wordless, running(), running(31))) == "Rank 0 has ended, and 2 ranks run."


def test_the_words_of_what_a_thread_does_form_a_sentence_with_its_place() -> None:
    f = stacks.frame("f", 2, "/x/b.py")
    opens = stacks.thread("opens or looks up a file, and the file system does not answer", pb.WAIT_FILE, f)
    assert said(*ranks(opens, opens)) == (
        "Both ranks open or look up a file, and the file system does not answer, in f (b.py:2)."
    )
    frozen = stacks.thread("is frozen by a control group", pb.WAIT_STOPPED)
    assert said(*ranks(*[frozen] * 4)) == "All 4 ranks are frozen by a control group."
    unseen = stacks.thread("waits for something that cannot be seen from outside", pb.WAIT_UNSPECIFIED, f)
    assert said(*ranks(in_collective(), unseen)).endswith(
        ": it waits for something that cannot be seen from outside in f (b.py:2)."
    )


def test_processes_without_ranks_or_with_the_same_one_are_named_by_pids() -> None:
    assert said(read(running(), pid=7), read(at_lock(), pid=5), read(running(), pid=8)) == (
        f"Process 5 waits for {LOCK}, and 2 processes run."
    )
    same = [read(on_gpu(), 0, pid=7), read(at_lock(), 0, pid=7)]
    assert said(*same, hosts=["n1", "n2"]) == (
        f"Process 7 on n1 waits for the GPU, but process 7 on n2 does not: it waits for {LOCK}."
    )


def test_launchers_and_workers_are_not_counted() -> None:
    launcher, worker = read(at_lock("wait"), pid=100), read(at_lock("get"), 1, pid=7, parent=4243)
    trainers = [read(in_collective(), rank, parent=100) for rank in range(2)]
    assert said(launcher, worker, *trainers) == (
        "Both ranks wait in all_reduce (train.py:12); no rank that was read is elsewhere."
    )


def test_each_job_has_a_line_of_its_own() -> None:
    found = [read(in_collective(), 0, job="81"), read(at_lock(), 1, job="81"), read(running(), 0, pid=5, job="82")]
    assert said(*found).split("\n") == [
        f"Job 81: Rank 1 is not in the all_reduce in which rank 0 waits: it waits for {LOCK}.",
        "Job 82: Process 5 runs in train_step (train.py:20).",
    ]


def test_of_processes_that_could_not_be_read_nothing_else_is_said() -> None:
    assert said(*ranks(None, None)) == "None of the 2 processes could be read."
    assert said(*ranks(None, running())) == ("Rank 1 runs in train_step (train.py:20); rank 0 could not be read.")
    assert said(*ranks(running(), running(), None, world=8)) == (
        "Both ranks run in train_step (train.py:20); ranks 2-7 of 8 were not read."
    )
    assert said(read(running(), 3, world=8)) == "Process 4245 runs in train_step (train.py:20)."  # asked for by pid


UNREAD = "its Python frames could not be read in time"


def test_a_rank_whose_frames_were_not_read_is_not_accused() -> None:
    waiting = [read(in_collective(), rank) for rank in range(3)]
    for guess in (stacks.thread(), stacks.thread("waits for a lock", pb.WAIT_LOCK)):
        assert said(*waiting, read(guess, 3, reason=UNREAD)) == (
            "Rank 3 could not be read; the other 3 wait in all_reduce (train.py:12)."
        )
        of_four = [read(in_collective(), rank, world=4) for rank in range(3)]
        assert said(*of_four, read(guess, 3, world=4, reason=UNREAD)) == (
            "Rank 3 of 4 was not read; the other 3 wait in all_reduce (train.py:12)."
        )
        assert said(read(guess, pid=7, reason=UNREAD)) == "Process 7 could not be read."


@pytest.mark.parametrize(
    ("words", "wait", "state"),
    [
        ("is stopped (SIGSTOP or Ctrl-Z)", pb.WAIT_STOPPED, pb.THREAD_STATE_STOPPED),
        ("is stopped by a debugger", pb.WAIT_STOPPED, pb.THREAD_STATE_TRACED),
        ("is frozen by a control group", pb.WAIT_STOPPED, pb.THREAD_STATE_SLEEPING),
        ("has ended", pb.WAIT_NONE, pb.THREAD_STATE_ENDED),
    ],
)
def test_what_the_kernel_tells_is_said_without_frames_too(words: str, wait: pb.Wait, state: pb.ThreadState) -> None:
    waiting = [read(in_collective(), rank) for rank in range(3)]
    odd = read(stacks.thread(words, wait, state=state), 3, reason=UNREAD)
    assert said(*waiting, odd) == f"Rank 3 is not in the all_reduce in which 3 ranks wait: it {words}."


def test_lists_and_verbs() -> None:
    assert [listed([(text, 1) for text in "abcde"[:count]]) for count in (1, 2, 3, 5)] == [
        *("a", "a and b", "a, b and c", "a, b, c and 2 more"),
    ]
    assert [plural(text) for text in ("is stopped", "has ended", "reads x", "watches it", "runs")] == [
        *("are stopped", "have ended", "read x", "watch it", "run"),
    ]
    assert [
        plural(text) for text in ("opens or looks up a file", "is frozen by a control group", "waits for a or b")
    ] == [
        *("open or look up a file", "are frozen by a control group", "wait for a or b"),
    ]


MAINS = [
    at_lock(), running(), running(31), on_gpu(), in_collective(), in_collective("all_gather"), in_collective(line=40),
    stacks.thread("is stopped", pb.WAIT_STOPPED), stacks.thread("", pb.WAIT_UNSPECIFIED), None,
]  # fmt: skip
PROCESSES = st.lists(
    st.builds(
        read,
        st.sampled_from(MAINS),
        st.one_of(st.none(), st.integers(min_value=0, max_value=40)),
        pid=st.integers(min_value=1000, max_value=1040),
        world=st.sampled_from([0, 8, 41]),
        parent=st.integers(min_value=1000, max_value=1040),
        job=st.sampled_from(["", "81"]),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each.process.pid,
)
PLACES = re.compile(r"\w+\.py:\d+|Job 81")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def named(text: str) -> set[int]:
    """The numbers in a text that name a rank or pid, and are no counts."""
    text = re.sub(r"\d+ (ranks|more|processes)|All \d+|other \d+|of \d+|of the \d+", "", text)
    return {number for low, high in RANGE.findall(text) for number in range(int(low), int(high or low) + 1)}


@given(PROCESSES)
def test_a_verdict_names_nobody_who_was_not_in_the_input(found: list[pb.ProcessStacks]) -> None:
    text = said(*found)
    assert text and all(line.endswith(".") for line in text.split("\n"))
    known = {each.process.pid for each in found} | {each.process.rank for each in found}
    for clause in re.split(r"[;.:]", PLACES.sub("", text)):
        if "not read" not in clause:
            assert named(clause) <= known, text
        else:
            assert named(clause) <= set(range(max(each.process.world_size for each in found))), text


@given(PROCESSES)
def test_groups_lose_no_process_and_tell_apart_what_waits_otherwise(found: list[pb.ProcessStacks]) -> None:
    groups = grouped([ReadProcess(stacks=each) for each in found])
    assert sorted(each.pid for group in groups for each in group.members) == sorted(each.process.pid for each in found)
    for group in groups:
        assert len({each.main.wait if each.main else None for each in group.members}) == 1
    sizes = [len(group.members) for group in groups if group.main is not None]
    assert sizes == sorted(sizes)
