"""Backends of several vendors as one."""

import threading
from collections.abc import Sequence

import pytest
from kinetod.config.metrics_settings import CountersConfig
from kinetod.counters.backend_group import AUTOMATIC, BACKENDS, CHOICES, BackendGroup, make_backend
from kinetod.counters.interface import CounterCode, CounterDevice, CounterError, WantedCounters
from kinetod.counters.kernel_gpus import AMD, NVIDIA
from kinetod.counters.sample_rings import RingWriter
from support.counters.memory_backend import MemoryBackend
from support.waiting import scaled, until

OVERVIEW = WantedCounters(set_name="overview")


def gpu(uuid: str, index: int = 0) -> CounterDevice:
    return CounterDevice(uuid=uuid, index=index, name="GPU", chip="", pci_bus_id="")


class Vendor(MemoryBackend):
    """A backend with one GPU, whose library fails or hangs as told."""

    def __init__(self, name: str, error: Exception | None = None, hang: threading.Event | None = None) -> None:
        super().__init__()
        self.name = name
        self.failing = error
        self.opening = hang
        self.opened = 0

    def open(self) -> None:
        self.opened += 1
        if self.opening is not None:
            self.opening.wait()
        if self.failing is not None:
            raise self.failing

    def devices(self) -> list[CounterDevice]:
        return [gpu(f"GPU-{self.name}")]


def group(
    nvidia: Vendor, amd: Vendor, known: Sequence[CounterDevice] = (), answer_s: float | None = None
) -> BackendGroup:
    def known_gpus(vendor: str) -> Sequence[CounterDevice]:
        return known if vendor == NVIDIA else ()

    return BackendGroup(
        {NVIDIA: nvidia, AMD: amd}, known_gpus=known_gpus, answer_s=scaled(15) if answer_s is None else answer_s
    )


def test_the_gpus_of_all_vendors_are_listed_and_each_is_measured_by_its_own() -> None:
    made = group(Vendor("green"), Vendor("red"))
    assert [(each.uuid, each.index) for each in made.devices()] == [("GPU-green", 0), ("GPU-red", 1)]
    assert (made.name, made.library_version) == ("green, red", "1, 1")
    assert made.member_of("GPU-red").name == "red"
    ring = RingWriter(1, most_ns=10**9)
    assert made.start("GPU-red", OVERVIEW, 10**6, lambda _: ring).plan.metrics[0].name == "metric"
    ring.close()


@pytest.mark.parametrize(
    ("error", "code", "problem"),
    [
        (CounterError(CounterCode.UNAVAILABLE, "no library"), "COUNTERS_UNAVAILABLE", "no library"),
        (CounterError(CounterCode.NOT_PERMITTED, "only root"), "COUNTERS_NOT_PERMITTED", "only root"),
        (ZeroDivisionError("a bug"), "COUNTERS_FAILED", "green: a bug"),
    ],
)
def test_a_vendor_that_fails_has_its_gpus_listed_with_the_reason_and_the_others_serve(
    error: Exception, code: str, problem: str
) -> None:
    made = group(Vendor("green", error), Vendor("red"), [gpu("GPU-green")])
    found = {each.uuid: each for each in made.devices()}
    assert (found["GPU-green"].code, found["GPU-green"].problem) == (code, problem)
    assert found["GPU-red"].problem == "" and made.name == "red"
    with pytest.raises(CounterError, match=f"GPU GPU-green: {problem}") as told:
        made.plan("GPU-green", OVERVIEW)
    assert told.value.code.value == code


def test_a_vendor_without_gpus_is_not_mentioned_where_another_one_has_some() -> None:
    made = group(Vendor("green", CounterError(CounterCode.UNAVAILABLE, "no driver")), Vendor("red"))
    assert [each.uuid for each in made.devices()] == ["GPU-red"]
    with pytest.raises(CounterError, match="there is no GPU GPU-green"):
        made.base_metrics("GPU-green")


def test_a_host_without_a_gpu_is_told_what_each_vendor_lacks() -> None:
    made = group(
        Vendor("green", CounterError(CounterCode.UNAVAILABLE, "no driver")),
        Vendor("red", CounterError(CounterCode.NOT_PERMITTED, "only root")),
    )
    with pytest.raises(CounterError, match="no driver; only root") as told:
        made.devices()
    assert told.value.code is CounterCode.NOT_PERMITTED


def test_a_library_that_hangs_is_left_alone_until_it_answers() -> None:
    go = threading.Event()
    hanging = Vendor("green", hang=go)
    made = group(hanging, Vendor("red"), [gpu("GPU-green")], answer_s=0.05)
    for _ in range(3):
        found = {each.uuid: each.problem for each in made.devices()}
        assert found["GPU-green"] == "the library of the green backend is not responding"
        if found["GPU-red"] == "":
            break
    until(lambda: hanging.opened, "the library is asked")
    assert hanging.opened == 1
    made._answer_s = scaled(15)
    assert made.member_of("GPU-red").name == "red"
    go.set()
    assert made._asked[NVIDIA].done.wait(scaled(15))
    assert {each.uuid: each.problem for each in made.devices()} == {"GPU-green": "", "GPU-red": ""}


def test_every_backend_can_be_configured_and_auto_has_one_of_each_vendor() -> None:
    kind = CountersConfig.__dataclass_fields__["counters_backend"].metadata["setting"].kind
    assert set(kind.words) == set(CHOICES)
    vendors = [BACKENDS[name].vendor for name in AUTOMATIC]
    assert len(set(vendors)) == len(vendors)
    assert {backend.vendor for backend in BACKENDS.values()} == set(vendors)
    for name in BACKENDS:
        assert make_backend(name, "", ()).name == name
