"""What is found of the DataLoader."""

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.loading import loading
from support.trace_files.sampled_stacks import BACKWARD, FORWARD, LOADER, MAIN, TORCH, Sample, sampled

TRAINING: list[Sample] = [*[FORWARD] * 3, *[(*MAIN, BACKWARD)] * 3]
FETCH = TORCH + "utils/data/_utils/fetch.py(49): _MapDatasetFetcher.fetch"
WAITING = (*MAIN, LOADER, TORCH + "utils/data/dataloader.py(1300): _MultiProcessingDataLoaderIter._get_data")
STARTING = (*MAIN, TORCH + "utils/data/dataloader.py(1000): _MultiProcessingDataLoaderIter.__init__")


def found(*extra: Sample) -> list[Finding]:
    """Ten steps, each with these samples."""
    return list(loading(sampled([*TRAINING, *extra] * 10, steps=10)))


def test_without_a_loader_there_is_no_finding() -> None:
    assert found() == []


def test_the_data_sets_function_with_most_of_the_time_is_named() -> None:
    stack = (*MAIN, LOADER, FETCH, "/job/data.py(3): Images.__getitem__", "/job/data.py(9): Images.read")
    (finding,) = found((stack, "idle"), (stack, "idle"))
    assert finding.name == "loading_in_the_step"
    assert finding.title == "Loading takes a part of each step, most of it Images.read (data.py:42)"
    assert finding.saving_ns == 200_000_000
    assert "num_workers" in finding.advice


def test_waiting_for_workers_says_that_they_are_not_in_the_trace() -> None:
    (finding,) = found((WAITING, "idle"))
    assert finding.title == "The step waits for the next batch from the DataLoader's workers"
    assert "not in this trace" in finding.evidence


def test_workers_that_start_in_several_steps_are_found_with_the_wait_for_their_first_batches() -> None:
    (finding,) = found(STARTING, (WAITING, "idle"))
    assert finding.name == "worker_start"
    assert finding.saving_ns == 200_000_000
    assert "persistent_workers=True" in finding.advice


def test_workers_that_start_once_are_the_programs_start() -> None:
    context = sampled([*[STARTING] * 10, *TRAINING * 10], steps=7)
    assert [finding.name for finding in loading(context)] == ["loading_in_the_step"]
