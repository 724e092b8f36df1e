"""Writes OpenTelemetry's profiles (opentelemetry.proto.profiles.v1development), by the package opentelemetry-proto.

Theory of operation
    There is one Profile per type of value, all in one scope of one resource, which is the traced process. They refer by
    number to one dictionary. A sample's link is the span that it was part of (base/telemetry_ids.py).

    An ExportProfilesServiceRequest, which endpoints accept, has the same form as the ProfilesData of a file.

    Profile ids are derived from the capture, the process and the type, so that a resent request can be recognised.

    The schema is under development: the package is an extra (`otlp`), and its release decides the version.
"""

import hashlib
from typing import TYPE_CHECKING

from kineto_agent import __version__

from kineto_trace.base.install_advice import install_advice
from kineto_trace.base.telemetry_ids import TraceContext
from kineto_trace.base.visible_text import one_line
from kineto_trace.errors import FormatError
from kineto_trace.formats.pprof_writer import GPU_MAPPING
from kineto_trace.formats.profile_samples import (
    LABELS,
    Profile,
    ProfileFrame,
    ProfileSamples,
    ProfileSubject,
    SampleType,
    Value,
    resource_attributes,
)

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1 import common_pb2 as common
    from opentelemetry.proto.profiles.v1development import profiles_pb2 as pb

SCOPE = "kinetod"
FRAME_TYPE = "profile.frame.type"  # of OpenTelemetry's semantic conventions
PYTHON_FRAME = "cpython"
_PERIOD = SampleType("cpu", "nanoseconds")


def otlp_message(found: Profile) -> "pb.ProfilesData":
    """Returns all profiles. Raises FormatError if the package is not installed."""
    try:
        from opentelemetry.proto.profiles.v1development import profiles_pb2 as pb
    except ImportError as exc:
        advice = install_advice("opentelemetry-proto")
        raise FormatError(f"OTLP profiles need the package opentelemetry-proto: {advice}") from exc
    dictionary = _Dictionary(pb.ProfilesDictionary(), found)
    message = pb.ProfilesData()
    resource = message.resource_profiles.add()
    for name, value in resource_attributes(found.trace).items():
        _set(resource.resource.attributes.add(key=one_line(name)).value, value)
    scope = resource.scope_profiles.add()
    scope.scope.name, scope.scope.version = SCOPE, __version__
    for samples in found.subjects:
        stacks = dictionary.stacks(samples)
        attributes = [dictionary.attributes(labels) for labels in samples.label_sets]
        links = [dictionary.link(span) for span in samples.sample_spans(found.parent_span)]
        for place, kind in enumerate(samples.types):
            _add(scope.profiles.add(), found, samples, place, dictionary, (stacks, attributes, links))
            scope.profiles[-1].profile_id = _profile_id(found, kind)
    message.dictionary.CopyFrom(dictionary.message)
    return message


def _add(
    entry: "pb.Profile",
    found: Profile,
    samples: ProfileSamples,
    place: int,
    dictionary: "_Dictionary",
    numbers: tuple[list[int], list[list[int]], list[int]],
) -> None:
    """Fills the profile of one type with the samples whose value is not 0."""
    stacks, attributes, links = numbers
    kind = samples.types[place]
    entry.time_unix_nano = max(0, found.trace.window_start_ns)
    entry.duration_nano = found.duration_ns
    entry.sample_type.type_strindex = dictionary.text(kind.name)
    entry.sample_type.unit_strindex = dictionary.text(kind.unit)
    if samples.subject is ProfileSubject.PYTHON and found.period_ns:
        entry.period_type.type_strindex = dictionary.text(_PERIOD.name)
        entry.period_type.unit_strindex = dictionary.text(_PERIOD.unit)
        entry.period = found.period_ns
    rows = zip(stacks, samples.labels.tolist(), samples.values[:, place].tolist(), links, strict=True)
    for stack, label_set, value, link in rows:
        if value:
            entry.samples.add(
                stack_index=stack, values=[value], attribute_indices=attributes[label_set], link_index=link
            )


def _profile_id(found: Profile, kind: SampleType) -> bytes:
    target = found.trace.target
    parts = target.capture_id, target.host, str(target.pid), str(found.trace.window_start_ns), kind.name
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).digest()[:16]


class _Dictionary:
    """The tables of everything that is referred to by number; entry 0 of each is empty."""

    def __init__(self, message: "pb.ProfilesDictionary", found: Profile) -> None:
        self.message = message
        for table in (
            message.mapping_table,
            message.location_table,
            message.function_table,
            message.link_table,
            message.attribute_table,
            message.stack_table,
        ):
            table.add()
        self._texts: dict[str, int] = {}
        self.text("")
        self._functions: dict[tuple[str, str, int], int] = {}
        self._locations: dict[tuple[int, int, int], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._attributes: dict[tuple[str, str | int], int] = {}
        self._links: dict[TraceContext, int] = {}
        self._program = self._mapping(found.trace.target.process_name or "process")
        self._gpu = self._mapping(GPU_MAPPING)

    def text(self, text: str) -> int:
        """Returns the number of a text."""
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self._texts)
            self.message.string_table.append(one_line(text))
        return number

    def stacks(self, samples: ProfileSamples) -> list[int]:
        """Returns the number of each sample's stack."""
        outer = {number: self._location(frame, 0) for number, frame in samples.frames.items()}
        found = []
        for path, line in zip(samples.paths(), samples.line.tolist(), strict=True):
            places = [outer[number] for number in path]
            if line and places:
                places[0] = self._location(samples.frames[path[0]], line)
            key = tuple(places)
            number = self._stacks.get(key)
            if number is None:
                number = self._stacks[key] = len(self._stacks)
                self.message.stack_table.add(location_indices=places)
            found.append(number)
        return found

    def attributes(self, labels: tuple[tuple[str, str | int], ...]) -> list[int]:
        """Returns the numbers of the attributes for these labels."""
        return [self._attribute(LABELS[name], value) for name, value in labels]

    def link(self, span: TraceContext | None) -> int:
        """Returns the number of the link to a span; 0 for none."""
        if span is None:
            return 0
        number = self._links.get(span)
        if number is None:
            number = self._links[span] = len(self._links) + 1
            self.message.link_table.add(trace_id=bytes.fromhex(span.trace_id), span_id=bytes.fromhex(span.span_id))
        return number

    def _attribute(self, name: str, value: str | int) -> int:
        number = self._attributes.get((name, value))
        if number is None:
            number = self._attributes[name, value] = len(self._attributes) + 1
            entry = self.message.attribute_table.add(key_strindex=self.text(name))
            _set(entry.value, value)
        return number

    def _mapping(self, name: str) -> int:
        self.message.mapping_table.add(filename_strindex=self.text(name))
        return len(self.message.mapping_table) - 1

    def _location(self, frame: ProfileFrame, line: int) -> int:
        function = self._function(frame)
        key = (function, line, self._gpu if frame.on_gpu else self._program)
        number = self._locations.get(key)
        if number is None:
            number = self._locations[key] = len(self._locations) + 1
            kinds = [self._attribute(FRAME_TYPE, PYTHON_FRAME)] if frame.place.file else []
            entry = self.message.location_table.add(mapping_index=key[2], attribute_indices=kinds)
            entry.lines.add(function_index=function, line=line)
        return number

    def _function(self, frame: ProfileFrame) -> int:
        place = frame.place
        key = (place.shown, place.file, place.line)
        number = self._functions.get(key)
        if number is None:
            number = self._functions[key] = len(self._functions) + 1
            self.message.function_table.add(
                name_strindex=self.text(place.shown),
                system_name_strindex=self.text(place.function),
                filename_strindex=self.text(place.file),
                start_line=place.line,
            )
        return number


def _set(entry: "common.AnyValue", value: Value) -> None:
    """Sets the value of an attribute."""
    if isinstance(value, str):
        entry.string_value = one_line(value)
    elif isinstance(value, int):
        entry.int_value = value
    else:
        entry.array_value.SetInParent()
        for each in value:
            entry.array_value.values.add(string_value=one_line(each))
