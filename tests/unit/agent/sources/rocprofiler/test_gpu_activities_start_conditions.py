"""When rocprofiler-sdk can record, and what is said when it cannot."""

from typing import Any, Dict, Optional

import pytest
from kineto_agent.sources.rocprofiler.gpu_activities import refusal

PATH = "/opt/rocm/lib/librocprofiler-sdk.so.1"
FRESH = {"initialised": 0, "finalised": 0, "configured": False, "runtime_up": False}
LATE = {**FRESH, "runtime_up": True}
TAKEN = {**LATE, "initialised": 1}
OURS = {**TAKEN, "configured": True}


def reason(version: int, facts: Dict[str, Any], environ: Optional[Dict[str, str]] = None) -> str:
    refused = refusal(version, PATH, facts, environ or {})
    return "" if refused is None else refused.reason_code


@pytest.mark.parametrize(
    ("version", "fresh", "late", "taken"),
    [
        (10000, "", "ROCPROFILER_TOO_LATE", "ROCPROFILER_LOCKED"),
        (10201, "", "ROCPROFILER_TOO_LATE", "ROCPROFILER_LOCKED"),
        (10300, "", "", "ROCPROFILER_LOCKED"),
        (10301, "", "", "ROCPROFILER_LOCKED"),
        (10302, "ROCPROFILER_HANGS", "ROCPROFILER_HANGS", "ROCPROFILER_HANGS"),
        (10304, "ROCPROFILER_HANGS", "ROCPROFILER_HANGS", "ROCPROFILER_HANGS"),
        (10305, "", "", ""),
        (10401, "", "", ""),
    ],
)
def test_what_a_late_client_can_do_depends_on_the_version(version: int, fresh: str, late: str, taken: str) -> None:
    assert (reason(version, FRESH), reason(version, LATE), reason(version, TAKEN)) == (fresh, late, taken)


@pytest.mark.parametrize("version", [10000, 10300, 10305])
def test_a_client_that_is_there_already_records_with_any_version(version: int) -> None:
    assert reason(version, OURS) == ""


def test_the_versions_that_hang_record_if_they_leave_queues_alone_and_we_were_there_first() -> None:
    alone = {"ROCPROFILER_QUEUE_INTERPOSITION": "0"}
    assert reason(10302, OURS, alone) == ""
    assert reason(10302, TAKEN, alone) == "ROCPROFILER_TOO_LATE"
    assert reason(10302, OURS) == "ROCPROFILER_HANGS"


@pytest.mark.parametrize("version", [600, 9999, 10500, 20000])
def test_an_unknown_version_is_refused_by_name(version: int) -> None:
    refused = refusal(version, PATH, FRESH, {})
    assert refused is not None
    assert refused.reason_code == "ROCPROFILER_UNKNOWN_VERSION"
    assert PATH in refused.reason
    assert "1.3 (ROCm 7.2.4, 7.13, 7.14, 10.0.0)" in refused.reason


def test_a_library_that_has_been_shut_down_cannot_come_back() -> None:
    assert reason(10305, {**OURS, "finalised": 1}) == "ROCPROFILER_FINALIZED"


def test_a_library_that_is_being_configured_is_left_alone() -> None:
    assert reason(10305, {**FRESH, "initialised": -1}) == "ROCPROFILER_BUSY"


@pytest.mark.parametrize(("version", "facts"), [(10200, TAKEN), (10200, LATE), (10302, TAKEN)])
def test_a_refusal_says_what_would_help(version: int, facts: Dict[str, Any]) -> None:
    refused = refusal(version, PATH, facts, {})
    assert refused is not None
    assert "kinetoctl run" in refused.reason
    assert "ROCP_TOOL_LIBRARIES" in refused.reason
