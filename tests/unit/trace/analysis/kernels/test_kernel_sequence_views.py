import pytest
from support.trace_files.hta_events import Event, event, gpu, launch, op, rows

COLUMNS = ("pattern", "length", "count", "gpu_us", "cpu_us")


def run(name: str, start: float, kernels: str, number: int, tid: int = 1) -> list[Event]:
    """An op of 50 us that launches kernels of 2 us each."""
    found = [op(name, start, 50, tid)]
    for place, kernel in enumerate(kernels):
        found.append(launch(number + place, start + 3 * place + 1, tid=tid))
        found.append(gpu(kernel, start + 10 * place + 60, 2, number + place))
    return found


@pytest.fixture
def events() -> list[Event]:
    # three times a, b, c under layer > aten::linear; once a, b; once c, b, a in a layer of its own
    found: list[Event] = []
    for place in range(3):
        found += [op("layer", 1000 * place, 100), *run("aten::linear", 1000 * place + 10, "abc", 10 * place + 1)]
    found += run("aten::linear", 5000, "ab", 51)
    return [*found, op("layer", 6000, 100), *run("aten::linear", 6010, "cba", 61)]


@pytest.mark.parametrize("hta", [False, True])
def test_sequences_are_counted_with_their_times(events: list[Event], hta: bool) -> None:
    assert rows(events, "frequent_sequences", *COLUMNS, hta=hta, op="layer") == [
        ("layer|a|b|c", 3, 3, 18, 300),
        ("layer|c|b|a", 3, 1, 6, 100),
    ]


def test_runs_at_any_depth_count_but_to_hta_only_the_least_deep(events: list[Event]) -> None:
    found = rows(events, "frequent_sequences", "pattern", "count", hta=False, op="linear", min_pattern_len=2)
    assert found == [("aten::linear|a|b|c", 3), ("aten::linear|a|b", 1), ("aten::linear|c|b|a", 1)]
    assert rows(events, "frequent_sequences", "pattern", op="linear", min_pattern_len=2) == [("aten::linear|a|b",)]


def test_only_the_most_frequent_are_given_but_to_hta_all(events: list[Event]) -> None:
    found = rows(events, "frequent_sequences", "pattern", hta=False, op="layer", top_k=1)
    assert found == [("layer|a|b|c",)]
    assert len(rows(events, "frequent_sequences", "pattern", op="layer", top_k=1)) == 2


def test_runs_inside_runs_do_not_count() -> None:
    events = [op("aten::outer", 0, 100), *run("aten::inner", 10, "abc", 1)]
    assert rows(events, "frequent_sequences", "pattern", "cpu_us", hta=False) == [("aten::outer|a|b|c", 100)]


def test_annotations_and_synchronisations_are_part_of_htas_sequences() -> None:
    sync = [launch(9, 40, name="cudaStreamSynchronize"), event("cuda_sync", "Stream Sync", 90, 2, 0, 7)]
    sync[1]["args"] = {"stream": 7, "correlation": 9}
    events = [event("user_annotation", "## forward ##", 0, 200), *run("aten::x", 10, "ab", 1), *sync]
    assert rows(events, "frequent_sequences", "pattern", op="forward") == [("## forward ##|a|b|Stream Sync",)]
    assert rows(events, "frequent_sequences", "pattern", hta=False, op="forward", min_pattern_len=2) == [
        ("## forward ##|a|b",)
    ]


def test_the_backward_threads_work_is_under_the_annotation_to_hta() -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 1000),
        event("user_annotation", "## backward ##", 100, 500),
        *run("autograd::engine::evaluate_function: X", 110, "abc", 1, tid=2),
    ]
    assert rows(events, "frequent_sequences", "pattern", op="backward") == [("## backward ##|a|b|c",)]
    assert rows(events, "frequent_sequences", "pattern", hta=False, op="## backward") == []


def test_an_op_that_is_not_there_is_told_of() -> None:
    from kineto_trace.catalog.view_catalog import find_view
    from support.trace_files.hta_events import context

    result = find_view("frequent_sequences")(context(run("aten::x", 0, "ab", 1)), op="nothing")
    assert result.notes == ("no event whose name contains 'nothing' launched 3 GPU activities",)


@pytest.mark.parametrize("hta", [False, True])
def test_events_that_end_before_they_start_do_no_harm(hta: bool) -> None:
    events = [*run("aten::x", 0.5, "abc", 1), launch(9, 20.3, 0.4, name="cudaGetDevice"), op("aten::y", 21.0, 0.1)]
    assert rows(events, "frequent_sequences", "pattern", hta=hta, op="aten::x") == [("aten::x|a|b|c",)]
