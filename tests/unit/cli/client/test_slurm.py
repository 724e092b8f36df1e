"""From the name of a Slurm job to its nodes, by what squeue and scontrol of Slurm 22.05 have printed."""

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.host_targets import Place, PlaceOptions, of_slurm_job, places
from kinetoctl.client.slurm import Expanded, SlurmJob, expand, node_addresses, parse_slurm_job, run_slurm
from kinetoctl.errors import CliError, JobNotRunning, NoSuchJob, SlurmFailed, UsageProblem

NODES = {"n1": "NodeAddr=10.0.0.1", "n2": "NodeAddr=10.0.0.2"}
NODE = "NodeName={} Arch=x86_64 Gres=gpu:2 {} NodeHostName=h Port=6818 Version=22.05.8 State=MIXED \n"
PARTS = {
    "1": "1|1|RUNNING|1000|ada|n[1-2]|None\n",
    "2": (
        "2|2_2|PENDING|1000|ada||JobArrayTaskLimit\n"
        "2|2_3|PENDING|1000|ada||JobArrayTaskLimit\n"
        "8|2_1|RUNNING|1000|ada|n1|None\n"
        "7|2_0|RUNNING|1000|ada|n2|None\n"
    ),
    "3": "3|3+0|RUNNING|1000|ada|n1|None\n4|3+1|RUNNING|1000|ada|n2|None\n",
    "5": "5|5|PENDING|1000|ada||BeginTime\n",
    "6": "6|6|COMPLETED|1000|ada|n1|None\n",
    "9": "9|9|SUSPENDED|1000|ada|n1|None\n",
}
STEPS = {
    "1": "1.0|n[1-2]\n1.1|n2\n1.batch|n1\n",
    "8,7": "2_0.0|n2\n2_0.batch|n2\n2_1.0|n1\n2_1.batch|n1\n",
    "3,4": "3.0|n1\n3.batch|n1\n4.0|n2\n",
}


def slurm(command: Sequence[str]) -> str:
    """squeue and scontrol."""
    options = dict(part.partition("=")[::2] for part in command[1:])
    if command[0] == "scontrol":
        lists = {"n[1-2]": "n1\nn2\n", "n1,n2": "".join(NODE.format(*node) for node in NODES.items())}
        return lists[command[-1]]
    if "--steps" in command:
        return STEPS[options["--jobs"]]
    assert {"--array", "--all", "--states"} <= options.keys()
    if options["--jobs"] not in PARTS:
        raise SlurmFailed("squeue --jobs=77 failed: slurm_load_jobs error: Invalid job id specified")
    return PARTS[options["--jobs"]]


def job(text: str) -> SlurmJob:
    return parse_slurm_job(text)


def selected(found: Expanded) -> dict[str, tuple[list[str], str]]:
    return {node.name: (list(node.selector.job_ids), node.selector.job_step) for node in found.nodes}


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.parametrize(
    ("text", "tasks", "component", "step"),
    [
        ("42", None, None, ""),
        ("42_7", {7}, None, ""),
        ("42_[1-3,7]", {1, 2, 3, 7}, None, ""),
        ("42_[0-8:4%2].0", {0, 4, 8}, None, "0"),
        ("42+1", None, 1, ""),
        ("42+1.2", None, 1, "2"),
        ("42.batch", None, None, "batch"),
    ],
)
def test_a_name_says_tasks_component_and_step(
    text: str, tasks: set[int] | None, component: int | None, step: str
) -> None:
    expected = None if tasks is None else frozenset(tasks)
    assert job(text) == SlurmJob(text=text, job=42, tasks=expected, component=component, step=step)


@pytest.mark.parametrize(
    "text",
    ["", "x", "42_", "42_x", "42_[]", "42_[3-1]", "42_[1-3:0]", "42_[1--3]", "42_1+1", "42.x", "42.-1", "4 2"],
)
def test_what_is_no_name_of_a_job_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a Slurm job like|expected array tasks like"):
        job(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", {"n1": (["1"], ""), "n2": (["1"], "")}),
        ("1.0", {"n1": (["1"], "0"), "n2": (["1"], "0")}),
        ("1.1", {"n2": (["1"], "1")}),
        ("1.batch", {"n1": (["1"], "batch")}),
        ("2", {"n1": (["8"], ""), "n2": (["7"], "")}),
        ("2_1", {"n1": (["8"], "")}),
        ("2_[0-3]", {"n1": (["8"], ""), "n2": (["7"], "")}),
        ("2.0", {"n1": (["8"], "0"), "n2": (["7"], "0")}),
        ("3", {"n1": (["3"], ""), "n2": (["3", "4"], "")}),
        ("3+0", {"n1": (["3"], "")}),
        ("3+1", {"n2": (["3", "4"], "")}),
        ("3.0", {"n1": (["3"], "0"), "n2": (["3", "4"], "0")}),
    ],
)
def test_each_node_is_asked_for_the_ids_that_run_there(
    text: str, expected: Mapping[str, tuple[list[str], str]]
) -> None:
    assert selected(expand(job(text), run=slurm)) == expected


def test_what_does_not_run_is_told() -> None:
    assert expand(job("2"), run=slurm).notes == ("2 of 4 parts of Slurm job 2 are running; the others are PENDING",)
    assert expand(job("2_0"), run=slurm).notes == ()


def test_others_are_told_whose_job_it_is_and_root_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    (note,) = expand(job("1"), run=slurm).notes
    assert note.startswith("Slurm job 1 belongs to ada; only its owner")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert expand(job("1"), run=slurm).notes == ()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("77", NoSuchJob, "Slurm does not know job 77"),
        ("6", NoSuchJob, "Slurm job 6 is COMPLETED: it has no processes left"),
        ("5", JobNotRunning, "Slurm job 5 is PENDING (BeginTime): it has no processes yet"),
        ("2_3", JobNotRunning, "Slurm job 2_3 is PENDING (JobArrayTaskLimit)"),
        ("9", JobNotRunning, "Slurm job 9 is SUSPENDED: its processes are suspended; try again once it has resumed"),
        ("2_9", NoSuchJob, "Slurm job 2 has no task 2_9; it has 2_2, 2_3, 2_1, 2_0"),
        ("3+2", NoSuchJob, "Slurm job 3 has no component 3+2; it has 3+0, 3+1"),
        ("1_0", NoSuchJob, "Slurm job 1 has no task 1_0; it has 1"),
        ("1.7", NoSuchJob, "Slurm job 1.7 has no such step at the moment; its steps are: 1.0, 1.1, 1.batch"),
    ],
)
def test_a_job_that_cannot_be_traced_is_an_error_that_says_why(text: str, error: type[CliError], message: str) -> None:
    with pytest.raises(error) as caught:
        expand(job(text), run=slurm)
    assert message in str(caught.value)


@pytest.mark.parametrize("line", ["1|RUNNING", "1|1__+|RUNNING|10|ada|n1|None", "1|1+x|RUNNING|10|ada|n1|None"])
def test_lines_that_are_not_as_asked_for_are_an_error(line: str) -> None:
    with pytest.raises(SlurmFailed, match=f"squeue printed an unexpected line: '{re.escape(line)}'"):
        expand(job("1"), run=lambda _: f"{line}\n")


def test_the_name_of_a_cluster_is_no_part() -> None:
    found = expand(job("6"), run=lambda _: "CLUSTER: mine\n6|6|RUNNING|1000|ada|n1|None\n")
    assert selected(found) == {"n1": (["6"], "")}


# places


def test_nodes_become_places_by_the_template() -> None:
    found = of_slurm_job(job("1"), "unix:/run/{host}.sock", [], print, slurm)
    assert [(place.host, place.address, list(place.selector.job_ids)) for place in found] == [
        ("n1", "unix:/run/n1.sock", ["1"]),
        ("n2", "unix:/run/n2.sock", ["1"]),
    ]
    assert [place.address for place in of_slurm_job(job("1"), "{address}:50051", [], print, slurm)] == [
        "10.0.0.1:50051",
        "10.0.0.2:50051",
    ]


def test_a_node_without_an_address_is_an_error() -> None:
    with pytest.raises(SlurmFailed, match="gives no address for n3"):
        node_addresses(["n1", "n3"], run=lambda _: NODE.format("n1", NODES["n1"]))


def test_named_hosts_choose_among_the_nodes_of_the_job() -> None:
    (place,) = of_slurm_job(job("1"), "{host}:50051", [Place("n2", "n2:9")], print, slurm)
    assert (place.host, place.address, list(place.selector.job_ids)) == ("n2", "n2:9", ["1"])
    with pytest.raises(ValueError, match="Slurm job 1 is not running on n3, but on n1, n2"):
        of_slurm_job(job("1"), "{host}:50051", [Place("n3", "n3:9")], print, slurm)


def test_conditions_are_added_to_those_of_the_job_and_take_the_place_of_none() -> None:
    place = Place("n1", "n1:9", pb.Selector(job_ids=["1"], job_step="0"))
    both = place.selected(pb.Selector(ranks=[3]))
    assert both == pb.Selector(job_ids=["1"], job_step="0", ranks=[3])
    for condition, option in ((pb.Selector(job_ids=["7"]), "--job-id"), (pb.Selector(job_step="1"), "--job-step")):
        with pytest.raises(UsageProblem, match=f"^{option}: the job or pod that you named already sets this condition"):
            place.selected(condition)


# Slurm's programs


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program squeue in the way."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(script: str) -> None:
        path = tmp_path / "squeue"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return put


def test_without_slurm_the_error_says_where_to_call_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmFailed, match=r"squeue, which is needed .*is not installed here.*login node"):
        places(PlaceOptions(slurm_job=job("1")), print)


def test_a_controller_that_does_not_answer_is_an_error_with_slurms_words(program: Callable[[str], None]) -> None:
    program("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(SlurmFailed, match=r"squeue --jobs=1 failed: slurm_load_jobs error: Unable to contact"):
        expand(job("1"))


def test_the_users_own_settings_of_squeue_hide_nothing(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SLURM_CLUSTERS", "mine")
    program("env")
    environ = run_slurm(["squeue"])
    assert "SQUEUE_PARTITION" not in environ and "SLURM_CLUSTERS=mine\n" in environ
