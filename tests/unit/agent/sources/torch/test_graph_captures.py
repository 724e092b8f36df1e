"""Captures of CUDA graphs with the real torch and a fake driver, in a process of its own."""

from __future__ import annotations  # the agent's tests run under 3.9

import os
import textwrap

import pytest
from support.machine import native
from support.targets import torch_forks

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def run(plan: str) -> None:
    """Run a plan. The process must end well, and must not have printed anything."""
    library = native.fake_graph_driver()
    done = torch_forks.run(
        "-m", "support.agent.graph_session", str(library), textwrap.dedent(plan), env=dict(os.environ)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_node_belongs_to_the_innermost_operator_with_those_around_it_and_its_inputs() -> None:
    run("""
        x = torch.ones(3, 4, requires_grad=True)
        with capture():
            launch("before")
            with torch.profiler.record_function("outer"):
                y = Launch.apply(x).sum()
            y.backward()
            launch("after")
        (graph,) = kept().graphs
        around = "autograd::engine::evaluate_function: LaunchBackward"
        assert paths(graph) == [
            ("before", ()), ("forward", ("outer", "Launch")), ("backward", (around, "LaunchBackward")),
            ("", (around, "LaunchBackward")), ("after", ())], paths(graph)
        forward = nodes(graph)[1]
        assert (forward.kind, forward.grid, forward.block) == (KERNEL, (1, 2, 3), (32, 64, 96))
        sizes_and_strides = struct.pack("<4q", 3, 4, 4, 1)
        assert forward.inputs == bytes([1, 0, 1, 6, 2, 0]) + sizes_and_strides, forward.inputs
        assert kept().dtypes[6] == "float" and not kept().left_out
        """)


def test_operators_of_other_threads_own_nodes_only_if_their_stream_captures() -> None:
    run("""
        x = torch.ones(2)
        def takes_part():
            driver.fake_use_stream(1)
            Launch.apply(x)
        def elsewhere():
            with torch.profiler.record_function("elsewhere"):
                waiting.set()
                go_on.wait()
                torch.ones(1) + 1
        with capture():
            in_thread(takes_part)
            waiting, go_on = threading.Event(), threading.Event()
            thread = threading.Thread(target=elsewhere)
            thread.start()
            waiting.wait()
            Launch.apply(x)
            launch("between")
            go_on.set()
            thread.join()
        assert paths(kept().graphs[0]) == [("forward", ("Launch",)), ("forward", ("Launch",)), ("between", ())]
        """)


def test_a_node_that_may_be_from_either_of_two_threads_has_no_operator() -> None:
    run("""
        inside, go_on = threading.Event(), threading.Event()
        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                inside.set()
                go_on.wait()
                return x * 1
        def other():
            driver.fake_use_stream(2)
            Slow.apply(torch.ones(1))
        with capture():
            thread = threading.Thread(target=other)
            thread.start()
            inside.wait()
            Launch.apply(torch.ones(1))
            go_on.set()
            thread.join()
            Launch.apply(torch.ones(1))
        assert paths(kept().graphs[0]) == [("forward", ()), ("forward", ("Launch",))], paths(kept().graphs[0])
        """)


def test_nothing_is_kept_of_a_capture_that_fails_and_the_program_gets_its_own_errors() -> None:
    run("""
        graph = torch.cuda.graphs.CUDAGraph()
        for fail in (True, False):
            try:
                assert graph.capture_begin(fail) == "begun"
            except ValueError as exc:
                assert str(exc) == "torch's own" and fail
        driver.fake_invalidate()
        torch.ones(1)
        graph.capture_end()
        try:
            with capture(fail=True):
                Launch.apply(torch.ones(1))
        except ValueError as exc:
            assert str(exc) == "torch's own"
        else:
            raise AssertionError("no error")
        assert kept().graphs == [] and sum(kept().left_out.values()) == 1, kept()
        with capture():
            Launch.apply(torch.ones(1))
        assert len(kept().graphs) == 1
        """)


def test_the_driver_is_asked_during_captures_only() -> None:
    run("""
        with capture():
            Launch.apply(torch.ones(1))
        before = driver.fake_queries()
        for _ in range(100):
            torch.ones(1) + 1
        assert driver.fake_queries() == before > 0
        captures.remove()
        assert CUDAGraph.capture_begin.__qualname__ == "CUDAGraph.capture_begin"
        assert not hasattr(CUDAGraph.capture_begin, "__wrapped__")
        with capture():
            Launch.apply(torch.ones(1))
        assert driver.fake_queries() == before and len(kept().graphs) == 1
        """)


def test_equal_graphs_are_kept_once_and_the_oldest_go_when_there_is_no_room() -> None:
    run("""
        for name in ("a", "b", "a"):
            with capture():
                launch(name)
        first, second = kept().graphs
        assert [paths(graph)[0][0] for graph in (first, second)] == ["b", "a"]
        captures._most_bytes = len(first) + len(second)
        with capture():
            launch("c")
        assert [paths(graph)[0][0] for graph in kept().graphs] == ["a", "c"]
        assert kept().left_out == {graph_captures.TOO_OLD: 1}
        """)


def test_the_nodes_of_a_large_graph_are_counted_only_where_the_stream_does_not_tell() -> None:
    run("""
        class Aside(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                driver.fake_use_stream(2)
                launch("aside")
                driver.fake_use_stream(1)
                return x.view(-1)
        class Two(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                launch("two")
                launch("two")
                return x.view(-1)
        x = torch.ones(2)
        with capture():
            for _ in range(1024):
                launch("many")
            Launch.apply(x)
            before = driver.fake_counts()
            for _ in range(100):
                x.view(-1)
            Launch.apply(x)
            Two.apply(x)
            Aside.apply(x)
            Launch.apply(x)
            assert driver.fake_counts() == before
            launch("outside")
            driver.fake_use_stream(2)
            Launch.apply(x)
            driver.fake_use_stream(1)
            Launch.apply(x)
        found = [(name, *path) for name, path in paths(kept().graphs[0])[1024:]]
        assert found == [
            ("forward", "Launch"), ("forward", "Launch"), ("two", "Two"), ("two", "Two"), ("aside",),
            ("forward", "Launch"), ("outside",), ("forward", "Launch"), ("forward", "Launch")], found
        """)


def test_operators_that_began_before_their_thread_took_part_are_around_those_that_did() -> None:
    run("""
        class Engine(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                driver.fake_use_stream(1)
                result = Launch.apply(x)
                driver.fake_use_stream(0)
                return result
        with capture():
            in_thread(lambda: Engine.apply(torch.ones(2)))
        assert paths(kept().graphs[0]) == [("forward", ("Engine", "Launch"))], paths(kept().graphs[0])
        """)


def test_a_graph_beyond_the_limits_is_left_out() -> None:
    run("""
        with capture():
            for _ in range(140_000):
                driver.fake_add_node(KERNEL, b"many")
        assert kept().graphs == []
        assert kept().left_out == {"the graph has too many nodes, operators or texts": 1}
        """)


def test_a_forked_child_keeps_nothing_even_if_it_is_forked_in_the_middle_of_a_capture() -> None:
    run("""
        with capture():
            Launch.apply(torch.ones(1))
        with capture():
            launch("second")
            child = os.fork()
            if child == 0:
                Launch.apply(torch.ones(1))
                os._exit(10 + len(graph_captures.CAPTURES.kept().graphs))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
        assert len(kept().graphs) == 2
        """)


def test_a_process_without_the_drivers_functions_says_for_how_many_graphs() -> None:
    run("""
        graph_captures._CUDA = "libmissing.so.1"
        ready(captures)
        for _ in range(2):
            with capture():
                launch("k")
        assert kept().graphs == [] and kept().left_out == {"libmissing.so.1 is not loaded": 2}
        """)


def test_a_session_hands_over_all_graphs_in_one_stream_of_bytes() -> None:
    run("""
        assert graph_session.session(1 << 26, captures) is None
        for name in ("a", "b"):
            with capture():
                launch(name)
        session = graph_session.session(1 << 26, captures)
        session.start()
        outcome = session.stop()
        assert outcome.counts.bytes == sum(map(len, kept().graphs)) and outcome.counts.dropped == 0
        data = os.pread(session.arena_fd, 1 << 22, 0)
        assert b"".join(kept().graphs) in data
        session.close()
        """)


def test_the_programs_modes_see_no_operator_of_the_agent() -> None:
    run("""
        from torch.utils._python_dispatch import TorchDispatchMode
        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                raise RuntimeError("a mode that knows few operators")
        seen, graph = [], torch.cuda.graphs.CUDAGraph()
        with Seen():
            in_thread(lambda: ready(captures))
            graph.capture_begin()
        Launch.apply(torch.ones(3))
        graph.capture_end()
        assert seen == [], seen
        assert nodes(kept().graphs[0])[0].inputs
        """)


def test_a_capture_that_another_one_overtakes_is_counted_and_the_other_is_kept() -> None:
    run("""
        first, second = torch.cuda.graphs.CUDAGraph(), torch.cuda.graphs.CUDAGraph()
        first.capture_begin()
        in_thread(second.capture_begin)
        launch("k")
        driver.fake_use_stream(1)
        first.capture_end()
        assert kept() == KeptGraphs([], kept().dtypes, {graph_captures.OVERTAKEN: 1}), kept().left_out
        """)


def test_captures_that_end_at_the_same_time_are_both_accounted_for() -> None:
    run("""
        graph, other = torch.cuda.graphs.CUDAGraph(), torch.cuda.graphs.CUDAGraph()
        with capture():
            launch("k")
        graph.capture_begin()
        launch("kept")
        captures._ends((graph,))
        in_thread(lambda: captures._ends((other,)))
        captures._ended((graph,))
        assert [paths(each)[0][0] for each in kept().graphs] == ["k", "kept"], kept().graphs
        """)


def test_captures_that_never_end_take_no_room_without_end() -> None:
    run("""
        graphs = [torch.cuda.graphs.CUDAGraph() for _ in range(graph_captures._MOST_OPEN + 3)]
        for graph in graphs:
            graph.capture_begin()
        assert kept().left_out == {graph_captures.OVERTAKEN: 3}, kept().left_out
        graphs[-1].capture_end()
        assert len(kept().graphs) == 1
        """)


def test_captures_are_watched_once_torch_has_initialised_cuda_which_it_says_itself() -> None:
    run("""
        captures.remove()
        captures._watcher, torch.cuda._initialized, captures._asked, captures._initialises = None, False, False, False
        woken, calls = [], len(torch.cuda._queued_calls)
        captures.install(wake=lambda: woken.append(torch.cuda._initialized))
        woken.clear()
        for _ in range(2):
            assert not captures.look()
        with capture():
            Launch.apply(torch.ones(1))
        assert kept() == KeptGraphs([], kept().dtypes, {graph_captures.NOT_READY: 1}), kept()
        for call, _traceback in torch.cuda._queued_calls[calls:]:
            call()
        assert woken == [False] and captures.look()
        torch.cuda._initialized = True
        assert not captures.look()
        with capture():
            Launch.apply(torch.ones(1))
        assert len(kept().graphs) == 1
        """)


def test_the_import_of_torch_only_asks_the_agents_thread_for_a_look() -> None:
    run("""
        import importlib
        captures.remove()
        name, asked = "torch.cuda.graphs", []
        module = sys.modules.pop(name)
        captures.install(wake=lambda: asked.append(hasattr(sys.modules[name].CUDAGraph.capture_begin, "__wrapped__")))
        importlib.import_module(name)
        assert asked == [False]
        assert not hasattr(sys.modules[name].CUDAGraph.capture_begin, "__wrapped__")
        captures._shadows.clear()
        assert not captures.look()
        assert hasattr(sys.modules[name].CUDAGraph.capture_begin, "__wrapped__")
        captures.remove()
        sys.modules[name] = module
        """)


def test_a_program_that_stops_its_agent_during_a_look_finds_torchs_own_methods() -> None:
    run("""
        captures.remove()
        captures.install()
        captures._is_ready = lambda: captures.remove() is None
        assert not captures.look()
        assert not hasattr(CUDAGraph.capture_begin, "__wrapped__")
        """)
