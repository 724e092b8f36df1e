"""Devices of a trace, their properties and vendor."""

from typing import Any

from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.model.context import Context
from kineto_trace.structure.gpu_devices import device_properties, gpu_vendor, vendor_words
from support.trace_files.traces import trace

MI300X = {"id": 0, "name": "AMD Instinct MI300X", "numSms": 304}


def context(devices: tuple[dict[str, Any], ...], *used: int, call: str = "") -> Context:
    calls = [{"name": call, "thread": 1}] if call else []
    return Context(
        trace({"kernel": [{"name": "k", "device": each} for each in used], "cuda_runtime": calls}, devices=devices)
    )


def test_devices_that_are_numbered_otherwise_have_the_properties_that_all_have() -> None:
    found = device_properties(context((MI300X, {**MI300X, "id": 1}), 9))
    assert found[9] == {**MI300X, "id": 9}


def test_a_device_stays_unknown_where_others_differ_or_are_numbered_alike() -> None:
    assert 9 not in device_properties(context((MI300X, {**MI300X, "id": 1, "numSms": 38}), 9))
    assert 9 not in device_properties(context((MI300X,), 0, 9))


def test_the_calls_tell_the_vendor_where_names_are_empty() -> None:
    assert gpu_vendor(context(({"id": 0, "name": ""},), 0, call="hipLaunchKernel")) is GpuVendor.AMD
    assert gpu_vendor(context((MI300X,), 0, call="cudaLaunchKernel")) is GpuVendor.AMD
    assert gpu_vendor(context((), 0)) is GpuVendor.UNKNOWN
    assert vendor_words(context((MI300X,), 0)).multiprocessor == "compute unit"
