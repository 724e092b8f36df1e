"""Writes pprof's profile format, which `pprof`, `go tool pprof`, Pyroscope and many others read.

Theory of operation
    One file has all subjects: each sample has a value of every type, those of other subjects being 0. `pprof
        -sample_index=gpu_time` chooses a type; without it, GPU time comes first, then CPU time.

    A location is a function with a line. Python functions have their file, the line of their definition and, for the
    innermost frame of a sample, the line at which it was. The lines of its callers are not recorded. Operators,
    annotations and kernels are functions without a file. There are two mappings, so that the tools do not look for
    symbols: the program, which is the file's name in their headings, and `[gpu]` for GPU work.

    Names come from an untrusted program, and pprof writes them to terminals unchanged. So control characters are
    escaped.
"""

from collections.abc import Collection

from kineto_protos.pprof import profile_pb2 as pb

from kineto_trace.base.visible_text import one_line
from kineto_trace.formats.profile_samples import (
    CPU,
    GPU_ACTIVITIES,
    GPU_TIME,
    HOST_TIME,
    Labels,
    Profile,
    ProfileFrame,
    ProfileSamples,
    SampleType,
    resource_attributes,
)
from kineto_trace.formats.text_sinks import gzip_member
from kineto_trace.model.trace import StringTable

TRACE_ID, SPAN_ID = "trace_id", "span_id"  # labels, as OpenTelemetry's mapping of pprof has them
RANK = "rank"  # a label of every sample, so that ranks can be told apart once their files are merged
GPU_MAPPING = "[gpu]"
_PROGRAM, _GPU = 1, 2
_FIRST = (GPU_TIME, CPU, HOST_TIME)  # the type that tools show first: the first of these that the profile has
# The type of a period; pprof's readers name profiles by it.
_PERIOD_TYPES = {GPU_ACTIVITIES: SampleType("gpu", "nanoseconds")}
_CPU_PERIOD = SampleType("cpu", "nanoseconds")


def pprof_file(found: Profile) -> bytes:
    """Returns the content of a file: compressed, as its readers expect."""
    return gzip_member(pprof_message(found).SerializeToString())


def pprof_message(found: Profile, *, without: Collection[str] = ()) -> pb.Profile:
    """Returns the profile. without: labels to leave out."""
    writer = _PprofWriter(found, without)
    for samples in found.subjects:
        writer.add(samples)
    return writer.finish()


class _PprofWriter:
    """Builds the message, with a table of everything that it refers to by number."""

    def __init__(self, found: Profile, without: Collection[str]) -> None:
        self._found = found
        self._without = frozenset(without)
        self._texts = StringTable()
        self._texts.add("")
        self._message = pb.Profile()
        self._functions: dict[tuple[str, str, int], int] = {}
        self._locations: dict[tuple[int, int, int], int] = {}
        self._labels: dict[Labels, list[pb.Label]] = {}
        self._types = found.types
        for kind in self._types:
            self._message.sample_type.append(self._type(kind))
        for name in (found.trace.target.process_name or "process", GPU_MAPPING):
            self._message.mapping.add(
                id=len(self._message.mapping) + 1,
                filename=self._text(name),
                has_functions=True,
                has_filenames=True,
                has_line_numbers=True,
            )

    def add(self, samples: ProfileSamples) -> None:
        """Adds the samples of one subject."""
        first = self._types.index(samples.types[0])
        before, after = [0] * first, [0] * (len(self._types) - first - len(samples.types))
        outer = {number: self._location(frame, 0) for number, frame in samples.frames.items()}
        labels = [self._label_set(entry) for entry in samples.label_sets]
        rank = self._found.trace.target.rank
        common = () if rank is None else self._label_set(((RANK, rank),))
        spans = samples.sample_spans(self._found.parent_span)
        rows = zip(
            samples.paths(), samples.line.tolist(), samples.labels.tolist(), samples.values.tolist(), spans, strict=True
        )
        for path, line, label_set, values, span in rows:
            entry = self._message.sample.add()
            places = [outer[number] for number in path]
            if line and places:
                places[0] = self._location(samples.frames[path[0]], line)
            entry.location_id.extend(places)
            entry.value.extend(before + values + after)
            entry.label.extend(labels[label_set])
            entry.label.extend(common)
            if span is not None:
                entry.label.extend(self._label_set(((TRACE_ID, span.trace_id), (SPAN_ID, span.span_id))))

    def finish(self) -> pb.Profile:
        """Returns the message."""
        found, message = self._found, self._message
        message.time_nanos = found.trace.window_start_ns
        message.duration_nanos = found.duration_ns
        if self._types:
            message.period_type.CopyFrom(self._type(_PERIOD_TYPES.get(self._types[0], _CPU_PERIOD)))
            message.period = found.period_ns or 1  # exact values count every nanosecond
            first = next(kind for kind in (*_FIRST, *self._types) if kind in self._types)
            message.default_sample_type = self._text(first.name)
        for name, value in resource_attributes(found.trace).items():
            shown = value if isinstance(value, str | int) else ", ".join(value)
            message.comment.append(self._text(f"{name}: {shown}"))
        message.string_table.extend(self._texts.strings)
        return message

    def _text(self, text: str) -> int:
        return self._texts.add(one_line(text))

    def _type(self, kind: SampleType) -> pb.ValueType:
        return pb.ValueType(type=self._text(kind.name), unit=self._text(kind.unit))

    def _location(self, frame: ProfileFrame, line: int) -> int:
        function = self._function(frame)
        key = (function, line, _GPU if frame.on_gpu else _PROGRAM)
        number = self._locations.get(key)
        if number is None:
            number = self._locations[key] = len(self._locations) + 1
            entry = self._message.location.add(id=number, mapping_id=key[2])
            entry.line.add(function_id=function, line=line)
        return number

    def _function(self, frame: ProfileFrame) -> int:
        place = frame.place
        key = (place.shown, place.file, place.line)
        number = self._functions.get(key)
        if number is None:
            number = self._functions[key] = len(self._functions) + 1
            self._message.function.add(
                id=number,
                name=self._text(place.shown),
                system_name=self._text(place.function),
                filename=self._text(place.file),
                start_line=place.line,
            )
        return number

    def _label_set(self, labels: Labels) -> list[pb.Label]:
        found = self._labels.get(labels)
        if found is None:
            found = self._labels[labels] = [
                pb.Label(key=self._text(key), num=value)
                if isinstance(value, int)
                else pb.Label(key=self._text(key), str=self._text(value))
                for key, value in labels
                if key not in self._without
            ]
        return found
