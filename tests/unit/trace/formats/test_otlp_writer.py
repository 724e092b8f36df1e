import sys
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.errors import FormatError
from kineto_trace.formats.otlp_writer import otlp_message
from kineto_trace.formats.profile_samples import profile
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.context import Context
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import ExportProfilesServiceRequest
from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData
from support.profiles.small_trace import OWN_SPAN, SPAN, profiled
from support.trace_files.traces import trace


def test_a_file_is_read_back_by_opentelemetry_s_schema(tmp_path: Path) -> None:
    path = tmp_path / "trace.otlp"
    export_trace(profiled(trace_parent=SPAN), path)
    data = ProfilesData.FromString(path.read_bytes())
    [resource] = data.resource_profiles
    attributes = {each.key: each.value for each in resource.resource.attributes}
    assert attributes["service.name"].string_value == "train.py"
    assert attributes["kineto.rank"].int_value == 3
    assert [each.string_value for each in attributes["kineto.gpu.models"].array_value.values] == ["NVIDIA H100"]
    [scope] = resource.scope_profiles
    assert scope.scope.name == "kinetod"
    texts = data.dictionary.string_table
    assert {texts[each.sample_type.type_strindex]: len(each.samples) for each in scope.profiles} == {
        "samples": 4, "cpu": 1, "gil_wait": 1, "idle": 1, "wall": 1,
        "host_time": 8, "gpu_activities": 4, "gpu_time": 4,
    }  # fmt: skip


def test_a_file_is_also_what_an_endpoint_takes(tmp_path: Path) -> None:
    data = otlp_message(profile(Context(profiled())))
    request = ExportProfilesServiceRequest.FromString(data.SerializeToString())
    assert (request.resource_profiles, request.dictionary) == (data.resource_profiles, data.dictionary)


def stacks_of(data: ProfilesData, kind: str) -> dict[tuple[str, ...], tuple[int, str, dict[str, Any]]]:
    """Value, span id and attributes by stack, the innermost frame first."""
    words = data.dictionary
    texts = words.string_table
    [entry] = [
        each
        for each in data.resource_profiles[0].scope_profiles[0].profiles
        if texts[each.sample_type.type_strindex] == kind
    ]
    found = {}
    for sample in entry.samples:
        places = [words.location_table[number] for number in words.stack_table[sample.stack_index].location_indices]
        lines = [(words.function_table[place.lines[0].function_index], place.lines[0].line) for place in places]
        stack = tuple(texts[function.name_strindex] + (f":{line}" if line else "") for function, line in lines)
        named = [words.attribute_table[number] for number in sample.attribute_indices]
        attributes = {texts[each.key_strindex]: each.value.int_value or each.value.string_value for each in named}
        [value] = sample.values
        found[stack] = (value, words.link_table[sample.link_index].span_id.hex(), attributes)
    return found


def test_samples_have_stacks_attributes_and_the_span_they_were_part_of() -> None:
    data = otlp_message(profile(Context(profiled(trace_parent=SPAN))))
    assert stacks_of(data, "gil_wait") == {
        ("f:4", "main"): (
            10_000_000,
            SPAN.split("-")[2],
            {"thread.id": 70, "thread.name": "MainThread", "kineto.thread.state": "waiting for the GIL"},
        )
    }
    found = stacks_of(data, "gpu_time")
    assert found["gemm", "aten::mm", "aten::linear", "request", "step"][:2] == (2, OWN_SPAN.split("-")[2])
    assert found["lost",] == (7, SPAN.split("-")[2], {"kineto.gpu.id": "0", "kineto.activity": "kernel"})


def test_entry_0_of_every_table_is_empty_and_no_other_is_there_twice() -> None:
    words = otlp_message(profile(Context(profiled(trace_parent=SPAN)))).dictionary
    for table in (
        words.mapping_table, words.location_table, words.function_table, words.link_table, words.attribute_table,
        words.stack_table,
    ):  # fmt: skip
        entries = [entry.SerializeToString() for entry in table]
        assert entries[0] == b""
        assert len(set(entries)) == len(entries)
    assert words.string_table[0] == ""
    assert len(set(words.string_table)) == len(words.string_table)


def test_a_sample_without_a_span_has_no_link() -> None:
    data = otlp_message(profile(Context(profiled())))
    assert stacks_of(data, "cpu") == {
        ("f:4", "main"): (
            10_000_000,
            "",
            {"thread.id": 70, "thread.name": "MainThread", "kineto.thread.state": "running"},
        )
    }


def test_ids_of_profiles_are_the_same_each_time_and_differ_by_type_and_process() -> None:
    def ids(pid: int) -> list[bytes]:
        data = otlp_message(profile(Context(profiled(pid=pid))))
        return [each.profile_id for each in data.resource_profiles[0].scope_profiles[0].profiles]

    assert ids(1) == ids(1)
    assert {len(each) for each in ids(1)} == {16}
    assert len({*ids(1), *ids(2)}) == 2 * len(ids(1))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.profiles.v1development", None)
    with pytest.raises(FormatError, match=r"pip install opentelemetry-proto"):
        otlp_message(profile(Context(trace({}))))


def test_control_characters_of_names_are_spelled_out() -> None:
    row = {"start": 0, "duration": 5, "name": "a\x1b[31m\nb\ud800", "stream": 7, "correlation": 1}
    data = otlp_message(profile(Context(trace({"kernel": [row]}))))
    assert r"a\x1b[31m\x0ab\ud800" in data.dictionary.string_table
    assert all(text.isprintable() for text in data.dictionary.string_table)
