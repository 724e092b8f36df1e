from typing import Any

from kineto_trace.formats.profiles.resource_attributes import ATTRIBUTES, resource_attributes
from support.profiles.small_trace import profiled
from support.trace_files.traces import target, trace


def test_everything_that_is_known_is_told() -> None:
    known = {"container.id": "c", "k8s.pod.uid": "u", "k8s.pod.name": "p", "k8s.namespace.name": "n"}
    found = resource_attributes(profiled(resource={**known, "k8s.container.name": "main"}, framework="torch 2.13.0"))
    assert found == {
        "service.name": "train.py",
        "host.name": "host",
        "process.pid": 4242,
        "process.executable.name": "python",
        "process.runtime.version": "3.11.7",
        "container.id": "c",
        "k8s.pod.uid": "u",
        "k8s.pod.name": "p",
        "k8s.namespace.name": "n",
        "k8s.container.name": "main",
        "kineto.capture.id": "cap",
        "kineto.job.id": "17",
        "kineto.rank": 3,
        "kineto.world_size": 8,
        "kineto.framework": "torch 2.13.0",
        "kineto.gpu.ids": ["0"],
        "kineto.gpu.models": ["NVIDIA H100"],
        "kineto.label.team": "vision",
    }
    assert set(ATTRIBUTES) == {*found, "kineto.label.NAME"} - {"kineto.label.team"}


def service(**changes: Any) -> object:
    return resource_attributes(trace({}, target=target(**changes)))["service.name"]


def test_a_label_of_the_capture_names_the_service_before_the_process_s_own_variables() -> None:
    own = {"service.name": "own"}
    assert service(labels={"service.name": "label"}, resource=own) == "label"
    assert service(resource=own) == "own"


def test_without_any_the_script_names_the_service_then_the_module_then_the_program() -> None:
    assert service(python_version="3.11", command=["python", "-u", "/app/train.py", "--x"]) == "train.py"
    assert service(python_version="3.11", command=["python", "-m", "pkg.train"]) == "pkg.train"
    assert service(command=["trainer", "x.py"]) == "python"  # no Python, so an argument is no script
    assert service(process_name="") == "unknown_service"


def test_rank_0_is_told() -> None:
    assert resource_attributes(trace({}, target=target(rank=0)))["kineto.rank"] == 0


def test_what_the_process_says_of_itself_does_not_replace_what_the_daemon_knows() -> None:
    found = resource_attributes(trace({}, target=target(resource={"host.name": "elsewhere", "team": "a"})))
    assert (found["host.name"], found["team"]) == ("host", "a")
