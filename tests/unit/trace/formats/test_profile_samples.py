from typing import Any

from kineto_trace.formats.profile_samples import (
    ATTRIBUTES,
    ProfileSamples,
    ProfileSubject,
    profile,
    resource_attributes,
)
from kineto_trace.model.context import Context
from support.profiles.small_trace import OWN_SPAN, PERIOD_NS, SPAN, profiled
from support.trace_files.traces import target, trace


def told(samples: ProfileSamples, *labels: str) -> dict[tuple[str, ...], list[int]]:
    """The values by stack, outermost frame first, with the line and the values of these labels behind it."""
    found = {}
    rows = zip(samples.paths(), samples.line.tolist(), samples.labels.tolist(), samples.values.tolist(), strict=True)
    for path, line, number, values in rows:
        stack = [samples.frames[frame].place.function for frame in reversed(path)]
        named = dict(samples.label_sets[number])
        key = (*stack, *([str(line)] if line else []), *(str(named.get(label, "")) for label in labels))
        assert key not in found
        found[key] = values
    return found


def subject(name: ProfileSubject, **changes: str) -> ProfileSamples:
    [samples] = profile(Context(profiled(**changes)), name).subjects
    return samples


def test_python_samples_are_told_by_line_and_by_the_state_of_the_thread() -> None:
    samples = subject(ProfileSubject.PYTHON)
    assert [kind.name for kind in samples.types] == ["samples", "cpu", "gil_wait", "idle", "wall"]
    assert told(samples, "thread_state", "waits_for") == {
        ("main", "", ""): [1, 0, 0, 0, PERIOD_NS],  # its state is not recorded
        ("main", "f", "4", "running", ""): [1, PERIOD_NS, 0, 0, 0],
        ("main", "f", "4", "waiting for the GIL", ""): [1, 0, PERIOD_NS, 0, 0],
        ("main", "f", "5", "idle", "lock"): [2, 0, 0, 2 * PERIOD_NS, 0],
    }


def test_samples_of_an_unknown_period_have_no_times() -> None:
    rows = {
        "python_function": [{"thread": 7, "parent": -1, "duration": 9, "name": "f", "samples": 4, "self_samples": 4}]
    }
    [samples] = profile(Context(trace(rows)), ProfileSubject.PYTHON).subjects
    assert ([kind.name for kind in samples.types], samples.values.tolist()) == (["samples"], [[4]])


def test_gpu_work_is_told_below_what_launched_it_by_gpu_and_activity() -> None:
    assert told(subject(ProfileSubject.GPU), "gpu", "activity") == {
        ("step", "aten::linear", "aten::mm", "gemm", "0", "kernel"): [1, 40],
        ("step", "request", "aten::linear", "aten::mm", "gemm", "0", "kernel"): [1, 2],
        ("lost", "0", "kernel"): [1, 7],
        ("Memcpy HtoD", "0", "gpu_memcpy"): [1, 5],
    }


def test_host_time_is_what_each_frame_took_itself() -> None:
    found = told(subject(ProfileSubject.HOST))
    assert found["step",] == [300]  # 1000 - 300 - 400
    assert found["step", "request", "aten::linear", "aten::mm"] == [100]


def test_the_thread_is_a_label_and_no_frame() -> None:
    samples = subject(ProfileSubject.GPU)
    assert samples.label_sets[0][:2] == (("thread_id", 70), ("thread_name", "MainThread"))
    assert "thread 70 (MainThread)" not in {frame.place.function for frame in samples.frames.values()}


def test_the_same_stack_on_two_threads_is_one_stack_with_two_samples() -> None:
    op = {"sequence": -1, "finished": 1, "inputs": -1, "duration": 5, "name": "aten::mm"}
    rows = {"cpu_op": [{**op, "thread": 1, "id": 1}, {**op, "thread": 2, "id": 2}]}
    [samples] = profile(Context(trace(rows)), ProfileSubject.HOST).subjects
    assert samples.stack.tolist() == [samples.stack[0]] * 2
    assert samples.values.tolist() == [[5], [5]]


def test_work_below_an_annotation_that_names_a_span_is_linked_to_it_and_all_else_to_the_process_s() -> None:
    found = profile(Context(profiled(trace_parent=SPAN)))
    samples = next(each for each in found.subjects if each.subject is ProfileSubject.GPU)
    spans = {
        tuple(samples.frames[frame].place.function for frame in path): span and span.span_id
        for path, span in zip(samples.paths(), samples.sample_spans(found.parent_span), strict=True)
    }
    assert spans["gemm", "aten::mm", "aten::linear", "request", "step"] == OWN_SPAN.split("-")[2]
    assert spans["gemm", "aten::mm", "aten::linear", "step"] == SPAN.split("-")[2]


def test_a_kernel_that_is_called_as_an_operator_is_another_frame() -> None:
    rows = {
        "cpu_op": [
            {"sequence": -1, "finished": 1, "inputs": -1, "start": 0, "duration": 9, "name": "x", "thread": 1, "id": 1}
        ],
        "cuda_runtime": [{"start": 2, "duration": 1, "name": "cudaLaunchKernel", "thread": 1, "correlation": 1}],
        "kernel": [{"start": 20, "duration": 3, "name": "x", "correlation": 1}],
    }
    [samples] = profile(Context(trace(rows)), ProfileSubject.GPU).subjects
    [path] = samples.paths()
    assert [samples.frames[frame].on_gpu for frame in path] == [True, False]


def test_a_trace_without_any_of_it_has_no_subjects() -> None:
    assert profile(Context(trace({}))).subjects == ()


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
