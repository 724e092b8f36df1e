"""Builds the message about one target for a receiver of profiles: `python -m kinetod.hooks.profile_payload`.

Its input came from a traced process, so it runs in a separate process that is confined like a decoder
(sandbox/confinement.py): it can read the target's folder, but has no network and no credentials. Standard output gets
MADE and the message, or FAILED and the problem with the target.
"""

import sys
import uuid
from pathlib import Path
from typing import BinaryIO

from kineto_protos.pprof import profile_pb2
from kineto_protos.pyroscope import push_pb2
from kineto_trace.base.visible_text import one_line
from kineto_trace.errors import TraceError
from kineto_trace.formats.otlp_writer import otlp_message
from kineto_trace.formats.pprof_writer import RANK, pprof_message
from kineto_trace.formats.profile_samples import THREAD_ID, ProfileSubject, profile, resource_attributes
from kineto_trace.model.context import Context
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY
from kineto_trace.store.parquet_folder import load_columns

from kinetod.config.addresses import ProfileForm
from kinetod.hooks.profile_sender import FAILED, MADE
from kinetod.sandbox.confinement import CannotConfine, Limits, confine, die_with_parent

# Pyroscope's names for the profiles of a subject. A label with each thread's number would create a series per thread;
# the rank is already a label of the series.
PYROSCOPE_NAMES = {ProfileSubject.PYTHON: "process_cpu", ProfileSubject.HOST: "host", ProfileSubject.GPU: "gpu"}
PYROSCOPE_WITHOUT = (THREAD_ID, RANK)


def payload(target_dir: Path, form: ProfileForm) -> bytes:
    """Returns the message; b"" if the trace has no profile. Raises TraceError."""
    context = Context(load_columns(target_dir / COLUMNS_DIRECTORY))
    if form is ProfileForm.PYROSCOPE:
        return _pyroscope(context)
    found = profile(context)
    return otlp_message(found).SerializeToString() if found.subjects else b""


def _pyroscope(context: Context) -> bytes:
    request, target = push_pb2.PushRequest(), context.trace.target
    attributes = resource_attributes(context.trace)
    shown = {name: value if isinstance(value, str | int) else ",".join(value) for name, value in attributes.items()}
    labels = {_label(name): one_line(str(value)) for name, value in shown.items()}
    for subject, name in PYROSCOPE_NAMES.items():
        found = profile(context, subject)
        if not found.subjects:
            continue
        series = request.series.add()
        for key, value in sorted({**labels, "__name__": name}.items()):
            series.labels.add(name=key, value=value)
        message: profile_pb2.Profile = pprof_message(found, without=PYROSCOPE_WITHOUT)
        identity = " ".join(map(str, (target.host, target.capture_id, target.pid, message.time_nanos, name)))
        series.samples.add(raw_profile=message.SerializeToString(), ID=str(uuid.uuid5(uuid.NAMESPACE_OID, identity)))
    return request.SerializeToString() if request.series else b""


def _label(name: str) -> str:
    """Returns a name that every version of Pyroscope accepts: letters, digits and underscores."""
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in name)


def main(arguments: list[str], output: BinaryIO) -> int:
    """Arguments: the target's folder, an empty one, the form, bytes of memory, seconds of CPU time, and whether all
    parts of the sandbox are required.
    """
    folder, own, form, memory, cpu_s, required = arguments
    target_dir = Path(folder).resolve()
    try:
        limits = Limits(memory_bytes=int(memory), cpu_s=int(cpu_s), required=required == "required")
        confine(Path(own), limits, readable=(target_dir,))
        output.write(MADE + payload(target_dir, ProfileForm(form)))
    except (TraceError, CannotConfine, MemoryError) as exc:
        text = str(exc) or "not enough memory: raise captures.decode_memory"
        output.write(FAILED + text.encode("utf-8", "replace"))
    output.flush()
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:], sys.stdout.buffer))
