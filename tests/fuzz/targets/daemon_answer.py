"""What a daemon says of captures and checks, shown by kinetoctl: as text, JSON and YAML, nothing of it steers."""

import contextlib
import io
import json
import re
from collections.abc import Iterator

from google.protobuf.message import DecodeError
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output import capture_summary, diagnosis
from kinetoctl.output.capture_progress import state_text
from kinetoctl.output.capture_summary import capture_document
from kinetoctl.output.console import as_json, as_yaml

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def play(data: bytes) -> None:
    kind, said = data[:1], data[1:]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            if kind == b"d":
                found = pb.Diagnosis.FromString(said)
                title, verdict = diagnosis.process_title(found), diagnosis.verdict(found)
                diagnosis.print_checks(title, found.checks, verdict, color=False)
            else:
                _capture(pb.Capture.FromString(said))
    except DecodeError:
        return
    assert not CONTROLS.search(printed.getvalue())


def _capture(capture: pb.Capture) -> None:
    capture_summary.print_capture(capture, {}, color=False)
    for target in capture.targets:
        state_text(target)
    document = capture_document(capture, {})
    text = as_json(document)
    json.loads(text)
    assert not CONTROLS.search(text) and not CONTROLS.search(as_yaml(document))


def seeds() -> Iterator[bytes]:
    """A capture with everything, one that failed, a diagnosis."""
    target = pb.Target(
        pid=7, start_time_ns=5, state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_DONE,
        files=[pb.TraceFile(format="chrome", name="a.json.gz", size_bytes=5, sha256="ab" * 32)],
        warnings=["careful"], overhead=pb.Overhead(start_ns=5, stop_ns=6, step_ratio=1.5),
    )  # fmt: skip
    spec = pb.CaptureSpec(duration_ns=10**9, labels={"team": "ml"})
    yield b"c" + pb.Capture(id="c", host="h", spec=spec, targets=[target]).SerializeToString()
    failed = pb.Target(pid=7, state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_FAILED, reason="gone", reason_code="X")
    yield b"c" + pb.Capture(id="c", host="h", targets=[failed]).SerializeToString()
    check = pb.Check(name="access", detail="the kernel \u202erefuses", advice="run \x1b[2J as root")
    yield b"d" + pb.Diagnosis(checks=[check]).SerializeToString()
