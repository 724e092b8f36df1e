"""What the daemon counts about itself."""

import asyncio
import re

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base import metrics
from kinetod.base.errors import Reason, VerdictReason
from kinetod.rpc.error_status import STATUS_CODES

_BAD_LABELS = {"pid", "capture", "capture_id", "user", "uid", "job", "id"}


def value(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


def ended(*targets: pb.Target, status: pb.CaptureStatus = pb.CAPTURE_STATUS_PARTIAL) -> pb.Capture:
    return pb.Capture(status=status, created_ns=10**9, ended_ns=3 * 10**9, targets=targets)


def target(**fields: object) -> pb.Target:
    return pb.Target(verdict=pb.VERDICT_PARTIAL, reason_code="RECORDS_DROPPED", **fields)  # type: ignore[arg-type]


def test_an_ended_capture_counts_its_targets_records_and_files() -> None:
    names = {
        "captures": ("kineto_captures_total", {"status": "PARTIAL"}),
        "seconds": ("kineto_capture_duration_seconds_sum", {"status": "PARTIAL"}),
        "targets": ("kineto_targets_total", {"verdict": "PARTIAL", "reason": "RECORDS_DROPPED"}),
        "started": ("kineto_capture_start_seconds_sum", {}),
        "records": ("kineto_records_total", {"source": "cupti"}),
        "dropped": ("kineto_records_dropped_total", {"source": "cupti"}),
        "raw": ("kineto_raw_bytes_total", {"source": "cupti"}),
        "stored": ("kineto_stored_bytes_total", {"format": "chrome"}),
    }
    before = {key: value(name, **labels) for key, (name, labels) in names.items()}
    first = target(
        requested_ns=10**9,
        collecting_ns=15 * 10**8,
        counts=[pb.SourceCounts(source="cupti", records=100, dropped=7, bytes=6400)],
        files=[pb.TraceFile(format="chrome", size_bytes=5000)],
    )
    metrics.capture_ended(ended(first, target()))
    grown = {key: round(value(name, **labels) - before[key], 3) for key, (name, labels) in names.items()}
    assert grown == {
        "captures": 1, "seconds": 2, "targets": 2, "started": 0.5, "records": 100, "dropped": 7, "raw": 6400,
        "stored": 5000,
    }  # fmt: skip


def test_what_agents_choose_cannot_make_labels_without_end() -> None:
    few = metrics._Few(["KNOWN"])
    values = {few(f"R{number}") for number in range(1000)}
    assert len(values) == metrics.MAX_VALUES + 1
    assert (few("R0"), few("KNOWN"), few("R999")) == ("R0", "KNOWN", metrics.OTHER)


def test_a_hostile_count_does_not_end_the_capture() -> None:
    source = metrics._few_sources("x")
    names = ("kineto_records_total", "kineto_records_dropped_total", "kineto_raw_bytes_total")
    before = [value(name, source=source) for name in names]
    metrics.capture_ended(ended(target(counts=[pb.SourceCounts(source="x", records=-5, dropped=-1, bytes=-9)])))
    assert [value(name, source=source) for name in names] == before


def test_a_decoding_tells_waiting_from_work() -> None:
    waited, worked = (
        value("kineto_decode_queue_seconds_count"),
        value("kineto_decode_duration_seconds_count", outcome="ok"),
    )
    with metrics.decode() as job:
        assert value("kineto_decode_waiting") == 1
        job.begins()
        assert value("kineto_decode_waiting") == 0
    assert value("kineto_decode_queue_seconds_count") == waited + 1
    assert value("kineto_decode_duration_seconds_count", outcome="ok") == worked + 1


def test_a_decoding_that_is_given_up_while_it_waits_does_not_wait_for_ever() -> None:
    with pytest.raises(asyncio.CancelledError), metrics.decode():
        raise asyncio.CancelledError
    assert value("kineto_decode_waiting") == 0


def test_a_call_is_counted_by_what_it_ended_with() -> None:
    def count(code: str) -> float:
        return value("kineto_grpc_requests_total", method="Test", code=code)

    with metrics.call("Test"):
        assert value("kineto_grpc_requests_running", method="Test") == 1
    with pytest.raises(asyncio.CancelledError), metrics.call("Test"):
        raise asyncio.CancelledError
    with pytest.raises(ValueError, match="aborted"), metrics.call("Test") as call:
        call.code = "NOT_FOUND"
        raise ValueError("aborted")
    assert [count(code) for code in ("OK", "CANCELLED", "NOT_FOUND")] == [1, 1, 1]
    assert value("kineto_grpc_requests_running", method="Test") == 0


def test_uploads_and_retention_are_counted() -> None:
    metrics.uploaded(1000, 2.0)
    metrics.upload_failed("TIMEOUT")
    metrics.UPLOADS_WAITING.set(3)
    metrics.pruned("age", 4000)
    assert value("kineto_uploaded_bytes_total") >= 1000
    assert value("kineto_upload_failures_total", reason="TIMEOUT") >= 1
    assert value("kineto_uploads_waiting") == 3
    assert value("kineto_pruned_bytes_total", reason="age") >= 4000
    assert value("kineto_pruned_captures_total", reason="age") >= 1


def test_names_and_labels_keep_prometheus_rules() -> None:
    for collector in set(metrics.REGISTRY._names_to_collectors.values()):
        for family in collector.collect():
            assert re.fullmatch(r"(kineto|process)_[a-z0-9_]+", family.name)
            assert family.type != "unknown"
            assert family.documentation.endswith(".")
            for sample in family.samples:
                assert not set(sample.labels) & _BAD_LABELS, sample


def test_reasons_are_known_before_they_come() -> None:
    assert {metrics._few_reasons(str(code)) for codes in (Reason, VerdictReason) for code in codes} == {
        *map(str, Reason),
        *map(str, VerdictReason),
    }


def test_every_refusal_has_a_code() -> None:
    assert set(STATUS_CODES.values()) <= set(grpc.StatusCode)
