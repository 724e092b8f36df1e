"""The GPUs of a trace: the properties of each, and whose they are.

Theory of operation
    Kineto numbers the devices in its deviceProperties as the program sees them, from 0 on, but AMD's kernels carry the
    number of a node of the host. If none of the devices that did work has properties, and those in the trace are alike
    but for their numbers, these are theirs: the program saw no other GPUs.

    The vendor is told by the properties, and else by the calls: some drivers leave the names of AMD's GPUs empty.
"""

from collections.abc import Mapping
from typing import Any

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.kernel_traits.gpu_vendors import WORDS, GpuVendor, VendorWords, vendor_of_calls, vendor_of_properties
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES

_OWN = ("id", "uuid")  # of one device alone
Properties = Mapping[int, Mapping[str, Any]]


def device_properties(context: Context) -> Properties:
    """Returns the properties of each GPU, by its number."""
    trace = context.trace
    found: dict[int, Mapping[str, Any]] = {
        item["id"]: item for item in trace.devices if isinstance(item.get("id"), int)
    }
    used = {device for kind in GPU_TABLES for device in unique_values(trace.table(kind)["device"]).tolist()}
    alike = {
        tuple(sorted((key, str(value)) for key, value in item.items() if key not in _OWN)) for item in found.values()
    }
    if len(alike) == 1 and used.isdisjoint(found):
        common = {key: value for key, value in next(iter(found.values())).items() if key not in _OWN}
        found |= {device: {**common, "id": device} for device in used}
    return found


def gpu_vendor(context: Context) -> GpuVendor:
    """Returns whose GPUs did the work of the trace."""
    vendors = {vendor_of_properties(item) for item in context.get(device_properties).values()}
    named = vendors - {GpuVendor.UNKNOWN}
    if len(named) == 1:
        return named.pop()
    trace = context.trace
    numbers = {number for kind in API_TABLES for number in unique_values(trace.table(kind)["name"]).tolist()}
    return vendor_of_calls(trace.strings[number] for number in sorted(numbers))


def vendor_words(context: Context) -> VendorWords:
    """Returns what the vendor of the trace's GPUs calls things."""
    return WORDS[context.get(gpu_vendor)]
