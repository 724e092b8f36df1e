"""The host as psutil tells it."""

import os
from pathlib import Path

import psutil
import pytest
from kinetod.telemetry import host_sample
from kinetod.telemetry.host_sample import HostCollector
from prometheus_client import CollectorRegistry, generate_latest
from support.waiting import scaled


def test_an_interface_whose_name_is_no_utf8_does_not_break_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counters = next(iter(psutil.net_io_counters(pernic=True).values()))
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: {os.fsdecode(b"e\xff"): counters})
    monkeypatch.setattr(host_sample, "DEADLINE_S", scaled(20))
    registry = CollectorRegistry()
    registry.register(HostCollector(tmp_path))
    assert 'device="e\\\\xff"' in generate_latest(registry).decode()
