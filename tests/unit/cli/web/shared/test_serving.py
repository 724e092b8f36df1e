"""The process from which analyses of users are forked is the server's to end."""

import gc
import warnings
from pathlib import Path

import psutil
import pytest
from kinetoctl.web.analyses.analysis_queue import AnalysisFailed, WorkerLimits
from kinetoctl.web.shared import serving
from kinetoctl.web.shared.serving import WarmProcess


def test_what_does_not_start_is_ended_and_waited_for_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_SANDBOX", "no_such_module_of_kinetoctl")
    warm = WarmProcess(WorkerLimits())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # subprocess warns of a process that nobody waited for
        for _ in range(3):
            with pytest.raises(AnalysisFailed, match="did not start"):
                warm.start()
            assert warm._process is None
            gc.collect()
        warm.close()


def test_a_process_that_was_closed_does_not_start_again() -> None:
    warm = WarmProcess(WorkerLimits())
    warm.close()
    with pytest.raises(AnalysisFailed, match="shutting down"):
        warm.start()
    assert warm._process is None


def test_workers_are_forked_from_a_process_that_has_imported_everything_and_has_one_thread() -> None:
    warm = WarmProcess(WorkerLimits())
    try:
        warm.start()
        assert warm._process is not None
        process = psutil.Process(warm._process.pid)
        libraries = {Path(each.path).name.partition(".")[0] for each in process.memory_maps()}
        assert {"libarrow", "_multiarray_umath"} <= libraries
        assert process.num_threads() == 1
    finally:
        warm.close()


def test_workers_have_no_credentials_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret of the server")
    warm = WarmProcess(WorkerLimits())
    try:
        warm.start()
        assert warm._process is not None
        environ = Path(f"/proc/{warm._process.pid}/environ").read_bytes()
        assert b"PATH=" in environ and b"secret of the server" not in environ
    finally:
        warm.close()
