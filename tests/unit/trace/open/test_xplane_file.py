"""Profiles that XLA wrote itself are opened like any other trace."""

import gzip
from pathlib import Path

import kineto_trace as kt
import pytest
from kineto_trace.errors import FileError
from kineto_trace.open.trace_opener import Form, detect
from support.xla.messages import PlaneMaker, begun_at, recorded, space


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(recorded("jax-plain-xspace"))
    return path


def test_a_profile_of_an_h200_is_analysed(profile: Path) -> None:
    trace = kt.open_trace(profile)
    assert (trace.target.host, trace.target.pid, trace.notes) == ("vm", 838, ())
    rows = kt.run_view("hlo_ops", trace).rows()
    found = tuple(rows[0][key] for key in ("hlo_op", "hlo_module", "where"))
    assert found == ("cudnn-conv-bw-filter.1", "jit__lambda", "GPU")
    assert len(kt.run_view("profiler_steps", trace).rows()) == 10
    assert kt.run_view("kernels", trace).rows()[0]["calls"] == 86


def test_it_is_written_in_other_forms(profile: Path, tmp_path: Path) -> None:
    trace = kt.open_trace(profile)
    written = kt.export_trace(trace, tmp_path / "trace.json")
    again = kt.open_trace(written.path)
    assert len(again.table("kernel")) == len(trace.table("kernel")) == 871
    assert kt.run_view("hlo_ops", again).rows() == kt.run_view("hlo_ops", trace).rows()


def test_a_compressed_one_is_opened_too(profile: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(profile.read_bytes()))
    assert detect(packed) is Form.XPLANE
    assert len(kt.open_trace(packed).table("kernel")) == 871


def test_of_a_truncated_one_the_beginning_is_there_and_a_note_says_so(profile: Path) -> None:
    profile.write_bytes(profile.read_bytes()[:-2000])
    trace = kt.open_trace(profile)
    assert trace.remarks == (
        "1 of XLA's profiles are truncated or damaged",
        "when 1 of XLA's profiles began is not known: their times count from there",
    )
    assert not trace.target.complete


def test_a_profile_without_events_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.xplane.pb"
    path.write_bytes(space(PlaneMaker("/host:CPU"), begun_at(1_795_163_478_000_000_000)))
    with pytest.raises(FileError, match="without an event that is known: record again, for longer"):
        kt.open_trace(path)


def test_damaged_gzip_is_said(tmp_path: Path) -> None:
    path = tmp_path / "cut.xplane.pb.gz"
    path.write_bytes(gzip.compress(recorded("jax-plain-xspace"))[:-100])
    with pytest.raises(FileError, match="is damaged"):
        kt.open_trace(path)
