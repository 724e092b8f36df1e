import gzip
import re
from pathlib import Path

import pytest
from kineto_protos.pprof import profile_pb2 as pb
from kineto_trace.formats.pprof_writer import pprof_file, pprof_message
from kineto_trace.formats.profile_samples import ProfileSubject, profile
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.open.trace_opener import open_trace
from support.profiles import pprof
from support.profiles.small_trace import SPAN, profiled
from support.trace_files.traces import START_NS, target, trace

H200 = Path(__file__).parents[3] / "data" / "h200"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "profile.pb.gz"
    export_trace(profiled(trace_parent=SPAN), path)
    return path


def test_pprof_itself_shows_gpu_time_by_kernel_first(written: Path) -> None:
    told = pprof.shown(written, "-top", "-unit=ns")
    assert "File: python\n" in told
    assert "kineto.rank: 3\n" in told
    assert "Type: gpu_time\n" in told
    rows = {line.split()[-1]: line.split()[0] for line in told.splitlines() if re.match(r" *\d+ns", line)}
    assert rows == {"gemm": "42ns", "lost": "7ns", "HtoD": "5ns"}


def test_pprof_itself_lists_cpu_time_by_line(written: Path) -> None:
    told = pprof.shown(written, "-top", "-lines", "-sample_index=cpu")
    assert re.search(r"^ +10ms +100% +100% +10ms +100% +f /app/train.py:4$", told, re.MULTILINE)


def test_pprof_itself_filters_by_a_label(written: Path) -> None:
    told = pprof.shown(written, "-traces", "-sample_index=samples", "-tagfocus=thread_state=idle")
    assert re.findall(r"^ +(\d+) +(\S+)$", told, re.MULTILINE) == [("2", "f")]


def test_pprof_itself_finds_what_a_span_did(written: Path) -> None:
    told = pprof.shown(written, "-traces", "-sample_index=gpu_time", "-tagfocus=span_id=00f067aa0ba902b7", "-unit=ns")
    assert re.findall(r"^ +(\d+ns) +(\S+)$", told, re.MULTILINE) == [("2ns", "gemm")]


def test_pprof_itself_merges_ranks_and_tells_them_apart(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.pb.gz" for rank in (0, 1)]
    for rank, path in enumerate(paths):
        export_trace(profiled(rank=rank), path)
    whole = pprof.shown(paths[0], "-top", "-unit=ns", str(paths[1]))
    assert "Total samples = 108ns" in whole
    one = pprof.shown(paths[0], "-top", "-unit=ns", "-tagfocus=rank=1", str(paths[1]))
    assert "accounting for 54ns, 50.00% of 108ns total" in one


def test_pprof_itself_finds_work_on_the_gpu_by_its_mapping(written: Path) -> None:
    told = pprof.shown(written, "-top", r"-focus=^gemm$", "-sample_index=gpu_activities")
    assert re.search(r"^ +2 .* gemm$", told, re.MULTILINE)
    assert "[gpu]" in pprof.shown(written, "-raw")


def test_pprof_itself_finds_all_gpu_time_of_a_real_training_and_no_more(tmp_path: Path) -> None:
    recorded = open_trace(H200 / "ddp4" / "rank0.json.gz")
    path = tmp_path / "h200.pb.gz"
    export_trace(recorded, path)
    total = sum(int(recorded.table(kind)["duration"].sum()) for kind in GPU_TABLES)
    told = pprof.shown(path, "-top", "-unit=ns", "-sample_index=gpu_time")
    assert f"Total samples = {total}ns (" in told
    assert "kineto.gpu.models: NVIDIA H200\n" in told


def test_a_file_is_compressed_and_states_window_and_period() -> None:
    found = pb.Profile.FromString(gzip.decompress(pprof_file(profile(Context(profiled())))))
    assert (found.time_nanos, found.duration_nanos, found.period) == (START_NS, 1_000_000, 10_000_000)
    texts = found.string_table
    assert (texts[0], texts[found.default_sample_type]) == ("", "gpu_time")
    assert (texts[found.period_type.type], texts[found.period_type.unit]) == ("cpu", "nanoseconds")


def test_every_number_refers_to_something() -> None:
    found = pprof_message(profile(Context(profiled(trace_parent=SPAN))))
    functions = {function.id for function in found.function}
    locations = {location.id for location in found.location}
    assert {line.function_id for location in found.location for line in location.line} == functions
    assert {number for sample in found.sample for number in sample.location_id} <= locations
    assert {location.mapping_id for location in found.location} == {mapping.id for mapping in found.mapping} == {1, 2}
    assert {len(sample.value) for sample in found.sample} == {len(found.sample_type)}
    assert len(set(found.string_table)) == len(found.string_table)


def test_one_subject_alone_has_its_own_types_and_period() -> None:
    found = pprof_message(profile(Context(profiled()), ProfileSubject.GPU), without=("thread_id",))
    texts = found.string_table
    assert [texts[kind.type] for kind in found.sample_type] == ["gpu_activities", "gpu_time"]
    assert (texts[found.period_type.type], found.period) == ("gpu", 1)
    assert "thread_id" not in {texts[label.key] for sample in found.sample for label in sample.label}


def test_a_name_that_is_no_valid_unicode_is_spelled_out() -> None:
    rows = {"kernel": [{"duration": 3, "name": "a\udcffb"}]}
    assert r"a\udcffb" in pprof_message(profile(Context(trace(rows)))).string_table


def test_a_trace_without_samples_is_an_empty_profile_and_a_note_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.pb.gz"
    assert export_trace(trace({}), path).notes == ("the trace has no samples, operators or GPU work",)
    assert not pb.Profile.FromString(gzip.decompress(path.read_bytes())).sample


HOSTILE = "a\x1b[31m\x07\x00\nb\u202e\ud800"
SHOWN = r"a\x1b[31m\x07\x00\x0ab\u202e\ud800"


def test_what_would_steer_a_terminal_is_spelled_out(tmp_path: Path) -> None:
    path = tmp_path / "hostile.pb.gz"
    row = {"start": 0, "duration": 5, "name": HOSTILE, "stream": 7, "correlation": 1}
    export_trace(trace({"kernel": [row]}, target=target(labels={"x": HOSTILE})), path)
    told = pprof.shown(path, "-top", "-unit=ns")
    assert any(line.startswith("       5ns") and line.endswith(f"  {SHOWN}") for line in told.splitlines())
    assert f"kineto.label.x: {SHOWN}" in told
