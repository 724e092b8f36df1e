"""Rests of the thread that loads modules, with a clock that the test sets."""

from typing import List

from kineto_agent.system.gil_rests import Rests


class Machine:
    """The modules time and _thread of a machine on which only sleep() takes time."""

    def __init__(self) -> None:
        self.thread = "agent"
        self.used_s = {"agent": 0.0, "program": 30.0}  # processor time
        self.now_s = 0.0
        self.slept_s: List[float] = []

    def get_ident(self) -> str:
        return self.thread

    def thread_time(self) -> float:
        return self.used_s[self.thread]

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_a_thread_rests_three_times_as_long_as_it_has_worked() -> None:
    machine = Machine()
    rests = Rests(machine, machine)
    for used_s in (0.0005, 0.002, 0.004):
        machine.used_s["agent"] = used_s
        rests.rest()
    assert machine.slept_s == [0.006, 0.006]


def test_no_rest_is_longer_than_20_ms() -> None:
    machine = Machine()
    rests = Rests(machine, machine)
    machine.used_s["agent"] = 40.0
    rests.rest()
    assert machine.slept_s == [0.02]


def test_another_thread_never_rests_however_long_it_has_worked() -> None:
    """It slept for three times all the processor time that it had ever used."""
    machine = Machine()
    rests = Rests(machine, machine)
    machine.thread = "program"
    rests.rest()
    assert machine.slept_s == []
