"""The observer of operators with the real torch, in a process of its own."""

from __future__ import annotations  # the agent's tests run under 3.9

import os
import textwrap

import pytest
from support.targets import torch_forks

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def run(plan: str) -> str:
    """Run a plan; gives what it printed. The process must end well."""
    done = torch_forks.run(
        "-m", "support.agent.ops_session", textwrap.dedent(plan), env={**os.environ, "KINETO_LOG_LEVEL": "5"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_every_op_of_every_thread_is_what_torchs_profiler_has() -> None:
    run("""
        train(model())  # what happens once only
        recording = Recording()
        with profiler() as profile:
            train(model())
            in_threads(3, lambda: train(model()))
        outcome = recording.stop()
        assert recording.counts() == profiled(profile), (
            recording.counts() - profiled(profile), profiled(profile) - recording.counts())
        assert len({op.thread for op in recording.ops}) == 4 and outcome.metadata["threads"] == 4
        assert (outcome.counts.dropped, outcome.warnings) == (0, [])
        assert {op.scope for op in recording.ops} == {0, 1, 7}
        assert all(op.scope == 7 for op in recording.ops if op.name.startswith("step "))
        """)


def test_ops_nest_and_are_numbered_as_they_begin() -> None:
    run("""
        recording = Recording()
        train(model())
        recording.stop()
        ops = sorted(recording.ops, key=lambda op: op.number)
        assert [op.number for op in ops] == list(range(len(ops)))
        open_ops = []
        for op in ops:
            assert op.start_ns <= op.end_ns
            while open_ops and open_ops[-1].end_ns <= op.start_ns:
                open_ops.pop()
            assert not open_ops or op.end_ns <= open_ops[-1].end_ns
            open_ops.append(op)
        """)


def test_backward_ops_on_autograds_threads_name_the_forward_thread() -> None:
    run("""
        net = model()
        recording = Recording()
        losses = []
        in_threads(1, lambda: losses.append(net(torch.randn(4, 8)).sum()))
        losses[0].backward()  # on this thread, of a forward on another
        recording.stop()
        backward = next(op for op in recording.ops if op.name == "AddmmBackward0")
        forward = [op for op in recording.ops if op.sequence == backward.sequence and op.scope == 0]
        assert backward.scope == 1 and {op.torch_thread for op in forward} == {backward.forward_thread}
        assert backward.torch_thread != backward.forward_thread and "aten::addmm" in {op.name for op in forward}
        """)


def test_shapes_are_what_torchs_profiler_has() -> None:
    run("""
        import json, tempfile
        from kineto_trace.decode.torch.torch_ops import inputs_text
        def work():
            train(model())
            a = torch.randn(2, 3)
            torch.cat([a, a.double()], dim=1)
            torch.einsum("ij,ij->i", a, a)
            a.to(torch.int16).permute(1, 0).contiguous()
            torch.stack([]) if False else torch.randn(1, 2, 3, 4, 5, 6).sum((0, 2))
            a.masked_fill(a > 0, True)
            torch.nn.functional.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))
        work()
        recording = Recording(record_shapes=True)
        dtypes = recording.session.metadata["dtypes"]
        with profiler(record_shapes=True) as profile:
            work()
        recording.stop()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.load(open(file.name))["traceEvents"]
        keys = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")
        theirs = Counter(
            (event["name"], json.dumps({key: event["args"].get(key, []) for key in keys}))
            for event in events if event.get("cat") in ("cpu_op", "user_annotation"))
        ours = Counter()
        for op in recording.ops:
            assert op.inputs
            args = json.loads("{" + inputs_text(op.inputs, dtypes).strip().strip("{}").strip(",") + "}")
            ours[op.name, json.dumps({key: args.get(key, []) for key in keys})] += 1
        assert ours == theirs, (list((ours - theirs).items())[:8], list((theirs - ours).items())[:8])
        ops = {(op.thread, op.number): op.name for op in recording.ops}
        assert recording.tensors and all((t[6], t[7]) in ops for t in recording.tensors)
        """)


def test_tensors_of_every_kind_are_described_without_harm() -> None:
    run("""
        import warnings
        warnings.simplefilter("ignore")
        recording = Recording(record_shapes=True)
        sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,))
        (sparse + sparse).to_dense()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        nested * 2
        strided_nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)])
        strided_nested.clone()
        torch.empty(1 << 40, 3, device="meta") + 1
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8).dequantize()
        torch.ones((1,) * 20).sum()
        torch.cat([torch.ones(1) for _ in range(100)])
        torch.view_as_real(torch.ones(2, dtype=torch.complex64))
        torch.linalg.svd(torch.ones(0, 3))
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            torch.ones(3) @ torch.ones(3)
        torch.func.vmap(lambda x: x * 2)(torch.ones(3, 2))
        outcome = recording.stop()
        assert outcome.warnings == [] and outcome.counts.dropped == 0
        cat = next(op for op in recording.ops if op.name == "aten::cat" and op.inputs[2] == 2 and op.inputs[4])
        assert cat.inputs[3:5] == bytes((32, 1))
        """)


def test_data_loader_workers_inherit_nothing_and_later_recordings_work() -> None:
    run("""
        from torch.utils.data import DataLoader, TensorDataset
        data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4, num_workers=2)
        net = model()
        for attempt in range(2):
            recording = Recording()
            with profiler() as profile:
                for (batch,) in data:
                    net(batch)
            outcome = recording.stop()
            assert {op.thread for op in recording.ops} >= {threading.get_native_id()}
            own = Counter(op.name for op in recording.ops)
            assert own == Counter(name for name, *_ in profiled(profile).elements())
            assert outcome.counts.dropped == 0
        """)


def test_a_forked_child_records_on_its_own_account() -> None:
    run("""
        import os
        net = model()
        recording = Recording()
        train(net)
        child = os.fork()
        if child == 0:
            torch.ones(2) + 1  # while the parent's callbacks are still there
            own = Recording()
            torch.ones(2) * 3
            own.stop()
            os._exit(0 if [op.name for op in own.ops].count("aten::mul") == 1 else 7)
        assert os.waitpid(child, 0)[1] == 0
        torch.ones(2) * 3
        recording.stop()
        assert sum(op.name == "aten::mul" and op.thread == os.getpid() for op in recording.ops) >= 1
        """)


def test_fifty_recordings_under_three_training_threads() -> None:
    run("""
        stopping = threading.Event()
        def work():
            net = model()
            while not stopping.is_set():
                train(net, 1)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for round in range(50):
            recording = Recording(4 << 20, record_shapes=bool(round % 2))
            while recording.session.counts().records < 200:
                time.sleep(0.001)  # the training threads need the GIL
            outcome = recording.stop()
            assert outcome.metadata["threads"] >= 1 and not outcome.warnings
        stopping.set()
        for thread in threads:
            thread.join()  # before the profiler: torch 2.13's own corrupts the heap beside them in 7 of 15 processes
        with profiler() as profile:
            in_threads(1, lambda: train(model()))
        assert profiled(profile)
        """)


def test_an_annotation_that_ends_on_another_thread_has_its_end() -> None:
    run("""
        recording = Recording()
        scope = torch.ops.profiler._record_function_enter_new("outside", None)
        in_threads(1, lambda: torch.ops.profiler._record_function_exit(scope))
        torch.ones(1)
        outcome = recording.stop()
        scope = next(op for op in recording.ops if op.name == "outside")
        assert scope.flags == 2 and scope.end_ns >= scope.start_ns and outcome.metadata["ended_elsewhere"] == 1
        """)


def test_what_runs_at_the_end_of_the_recording_is_unfinished() -> None:
    run("""
        recording = Recording()
        with torch.profiler.record_function("long"):
            torch.ones(1)
            outcome = recording.stop()
        scope = next(op for op in recording.ops if op.name == "long")
        assert (scope.flags, scope.end_ns) == (1, 0) and outcome.metadata["unfinished"] == 1
        """)


def test_an_exit_while_recording_is_clean() -> None:
    """Threads that are inside ops then: native/drive_ops.c (CPython itself kills those that train at its end)."""
    printed = run("""
        import atexit
        recording = Recording()
        scope = torch.profiler.record_function("open")
        scope.__enter__()
        net = model()
        train(net)
        atexit.register(lambda: train(net))
        print(recording.session.counts().dropped)
        """)
    assert printed == "0\n"


def test_ops_are_their_threads_in_each_of_several_recordings_with_other_threads_and_options() -> None:
    run("""
        import os
        from support.agent.named_workers import Crew, Worker, is_workers
        def work(number):
            with torch.profiler.record_function("f%d" % number):
                torch.ones(number % 5 + 1).sum()
        def record(crew, **options):
            crew.change()
            recording = Recording(**options)
            made = crew.turns()
            crew.change()
            made += crew.turns()
            recording.stop()
            found = Counter((op.name, op.thread) for op in recording.ops if is_workers(op.name))
            assert found == Counter(made), (found, made)
            assert any(op.inputs for op in recording.ops) == bool(options), options
        crew = Crew(1, lambda: Worker(work))
        for number in range(4):
            record(crew, **({"record_shapes": True} if number % 2 else {}))
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    child = Crew(2, lambda: Worker(work))
                    record(child)
                    record(child, record_shapes=True)
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
        """)
