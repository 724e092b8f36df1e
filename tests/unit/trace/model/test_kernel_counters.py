"""The kernel's counters survive JSON, and nothing that is not of their form is taken for them."""

from typing import Any

import pytest
from kineto_trace.model.kernel_counters import PROCESS, KernelCounters

GIVEN: dict[str, Any] = {
    "times": [100, 200, 400],
    "rows": {"interval": [0, 1, 1], "thread": [7, 7, 8], "cpu_ns": [50, 100, 0], "wait_ns": [10, 0, 20],
             "switches": [1, 2, 3]},
    "events": {"thread": [7], "voluntary_switches": [1], "involuntary_switches": [2], "minor_faults": [3],
               "major_faults": [4]},
    "lives": {"thread": [8], "first_ns": [200], "last_ns": [400]},
    "process": {name: [5, 6] for name in PROCESS} | {"read_bytes": [5, -1]},
    "children": {"pid": [50], "first_ns": [100], "last_ns": [300], "cpu_ns": [90], "wait_ns": [10],
                 "major_faults": [1], "read_bytes": [-1]},
    "child_names": ["worker"],
    "neighbours": {"pid": [70], "cpu_ns": [80]},
    "neighbour_names": ["make"],
    "host_cores": 4,
    "usable_cores": 2,
    "quota_cores": 1.5,
    "quota_group": "/jobs",
    "notes": ["told"],
}  # fmt: skip


def test_counters_survive_json_and_add_up() -> None:
    found = KernelCounters.parse(GIVEN)
    assert found is not None
    assert found.to_json() == GIVEN
    assert found.duration_ns == 300
    assert found.life_of() == {8: (200, 400)}
    assert found.by_thread() == {7: (150, 10, 3), 8: (0, 20, 3)}
    assert (found.process_total("cpu_ns"), found.process_total("read_bytes")) == (11, None)


@pytest.mark.parametrize("change", [
    {"times": [100]}, {"times": [100, 100, 400]}, {"times": "x"}, {"times": [100, 200, 1 << 63]},
    {"times": [1.0, 2, 3]},
    {"rows": None}, {"rows": {**GIVEN["rows"], "interval": [0, 1, 2]}}, {"rows": {**GIVEN["rows"], "thread": [7]}},
    {"events": {}}, {"lives": {}}, {"child_names": []},
    {"children": {**GIVEN["children"], "last_ns": [100]}}, {"neighbour_names": []}, {"neighbours": {"pid": [70]}},
    {"process": {**GIVEN["process"], "cpu_ns": [5]}}, {"process": {"cpu_ns": [5, 6]}},
])  # fmt: skip
def test_what_is_not_of_the_form_is_nothing(change: dict[str, Any]) -> None:
    assert KernelCounters.parse(GIVEN | change) is None
    assert KernelCounters.parse({}) is None


def test_older_counters_have_no_neighbours() -> None:
    older = {name: value for name, value in GIVEN.items() if not name.startswith("neighbour")}
    found = KernelCounters.parse(older)
    assert found is not None
    assert (found.neighbour_names, found.neighbours["cpu_ns"].tolist()) == ((), [])


def test_limits_that_are_impossible_are_unknown() -> None:
    found = KernelCounters.parse(
        GIVEN | {"host_cores": "4", "usable_cores": -9, "quota_cores": "x", "quota_group": 3, "notes": [1]}
    )
    assert found is not None
    assert (found.host_cores, found.usable_cores, found.quota_cores, found.quota_group, found.notes) == (
        -1, -1, 0.0, "", (),
    )  # fmt: skip
