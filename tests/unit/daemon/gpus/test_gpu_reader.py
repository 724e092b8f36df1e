"""The daemon's side of reading GPUs: deadlines, sharing, processes that die."""

import os
import sys
import threading
from pathlib import Path

from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import GpuQuestion, LibraryState, Snapshot
from support.machine.gpus import FakeGpus
from support.waiting import until

LONG_S = 30.0


def nvml(snapshot: Snapshot) -> LibraryState:
    return snapshot.libraries[0].state


def test_who_asks_soon_after_another_gets_the_same_answer(reader: GpuReader) -> None:
    first = reader.read(deadline_s=LONG_S)
    assert len(first.gpus) == 2
    assert reader.read(max_age_s=LONG_S) is first
    assert reader.read(max_age_s=0, deadline_s=LONG_S) is not first


def test_who_asks_for_processes_gets_these_alone_unless_everything_was_read(gpus: FakeGpus, reader: GpuReader) -> None:
    gpus.say("process 1 77 500 33", "hang 1")  # the driver, in what is not asked for
    users = reader.read(question=GpuQuestion.PROCESSES, deadline_s=LONG_S)
    assert [[process.pid for process in gpu.processes] for gpu in users.gpus] == [[], [77]]
    assert [(gpu.device, gpu.works, gpu.utilization) for gpu in users.gpus] == [
        ("nvidia0", True, None),
        ("nvidia1", True, None),
    ]
    assert reader.latest() == Snapshot()
    gpus.say("process 0 77 500 33")
    everything = reader.read(max_age_s=LONG_S, deadline_s=LONG_S)
    assert everything.gpus[0].processes[0].memory_bytes == 500 << 20
    assert reader.read(max_age_s=LONG_S, question=GpuQuestion.PROCESSES) is everything


def test_a_question_waits_for_the_answer_to_the_one_before(gpus: FakeGpus, reader: GpuReader) -> None:
    reader.read(deadline_s=LONG_S)
    gpus.say("hang 1")
    assert nvml(reader.read(max_age_s=0, deadline_s=0.05)) is LibraryState.LATE
    assert nvml(reader.read(max_age_s=0, deadline_s=0.05, question=GpuQuestion.PROCESSES)) is LibraryState.LATE
    gpus.say("process 0 77 500 33")
    found = reader.read(max_age_s=0, deadline_s=LONG_S, question=GpuQuestion.PROCESSES)
    assert found is reader.latest()  # everything was asked for first, and has the processes
    found = reader.read(max_age_s=0, deadline_s=LONG_S, question=GpuQuestion.PROCESSES)
    assert found is reader.latest(question=GpuQuestion.PROCESSES)
    assert found is not reader.latest()


def test_a_driver_that_hangs_costs_the_deadline_and_its_answer_is_taken_later(
    gpus: FakeGpus, reader: GpuReader
) -> None:
    reader.read(deadline_s=LONG_S)
    (pid,) = reader.pids()
    gpus.say("hang 1")
    late = reader.read(max_age_s=0, deadline_s=0.05)
    assert (late.gpus, nvml(late)) == ((), LibraryState.LATE)
    assert "did not answer within 0.05 s" in late.libraries[0].detail
    gpus.say("gpus 1")
    found = until(lambda: reader.read(max_age_s=0, deadline_s=0.05).gpus, "the late answer is there")
    assert len(found) == 2  # asked while there were two
    assert reader.pids() == {pid}


def test_who_waits_for_another_reading_waits_no_longer_than_wanted(gpus: FakeGpus, reader: GpuReader) -> None:
    gpus.say("hang 1")
    other = threading.Thread(target=reader.read, kwargs={"deadline_s": LONG_S})
    other.start()
    until(reader.pids, "the other one has asked")
    assert nvml(reader.read(deadline_s=0.05)) is LibraryState.LATE
    gpus.say()
    other.join()


def test_a_driver_that_crashes_leaves_the_daemon_alone(gpus: FakeGpus, reader: GpuReader) -> None:
    gpus.say("crash 1")
    crashed = reader.read(deadline_s=LONG_S)
    assert nvml(crashed) is LibraryState.FAILED
    assert "exit status -9" in crashed.libraries[0].detail
    assert reader.pids() == set()


def test_after_a_crash_it_is_tried_again_a_little_later(gpus: FakeGpus) -> None:
    now = [0.0]
    reader = GpuReader(clock=lambda: now[0])
    gpus.say("crash 1")
    reader.read(deadline_s=LONG_S)
    gpus.say()
    assert nvml(reader.read(deadline_s=LONG_S)) is LibraryState.FAILED
    now[0] += 10
    assert nvml(reader.read(deadline_s=LONG_S)) is LibraryState.OK
    reader.close()


def test_a_process_that_hangs_for_good_is_replaced(gpus: FakeGpus) -> None:
    now = [0.0]
    reader = GpuReader(clock=lambda: now[0])
    gpus.say("hang 1")
    assert nvml(reader.read(deadline_s=0.05)) is LibraryState.LATE
    (pid,) = reader.pids()
    gpus.say()
    now[0] += 100
    assert nvml(reader.read(deadline_s=LONG_S)) is LibraryState.OK
    assert reader.pids() != {pid}
    reader.close()


def test_a_process_that_ended_since_nobody_asked_is_started_again(reader: GpuReader) -> None:
    reader.read(deadline_s=LONG_S)
    (pid,) = reader.pids()
    process = reader._process
    assert process is not None and process.stdin is not None
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), process.stdin.fileno())
    process.wait()  # its standard input has ended
    assert nvml(reader.read(max_age_s=0, deadline_s=LONG_S)) is LibraryState.OK
    assert reader.pids() != {pid}


def test_a_program_that_answers_nonsense_is_refused() -> None:
    reader = GpuReader(command=(sys.executable, "-c", "import sys; sys.stdin.read(1); print('{}]')"))
    found = reader.read(deadline_s=LONG_S)
    assert nvml(found) is LibraryState.FAILED
    assert "invalid answer" in found.libraries[0].detail
    reader.close()


def test_closing_ends_the_process(reader: GpuReader) -> None:
    reader.read(deadline_s=LONG_S)
    (pid,) = reader.pids()
    reader.close()
    assert not Path(f"/proc/{pid}").exists()
    assert nvml(reader.read(max_age_s=0)) is LibraryState.FAILED
