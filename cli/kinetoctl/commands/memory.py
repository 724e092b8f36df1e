"""`kinetoctl memory`: a CUDA memory snapshot, taken by a capture."""

import uuid
from pathlib import Path

import click
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import ATTACHMENTS

from kinetoctl.base.common_options import common_options, current
from kinetoctl.base.value_types import DURATION, KEEP, SIZE
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.enum_names import RECORDERS
from kinetoctl.client.selection import Selection
from kinetoctl.client.tracing import TraceRequest
from kinetoctl.commands.trace import run_trace
from kinetoctl.options.output_dir import FOLDER, prepare_folder
from kinetoctl.options.selection_options import required, selector_options

ACTIVITY_TYPE = "memory_snapshot"
DEFAULT_DURATION_NS = 10_000_000_000
assert ACTIVITY_TYPE in ATTACHMENTS


@click.command("memory")
@selector_options
@click.option("--duration", type=DURATION, help="How long to record allocations before the snapshot.  [default: 10s]")
@click.option("--with-stack", is_flag=True, help="Record the Python stack of each allocation; about 2 us each.")
@click.option(
    "--buffer-limit", type=SIZE, help="Limit of the memory for the snapshot in each process, for example 256MiB."
)
@click.option("--no-attach", is_flag=True, help="Use only processes that already have an agent; attach to no others.")
@click.option(
    "--keep-agent",
    type=KEEP,
    help="How long an attached agent stays after the capture; 0 removes it at once.  [default: the daemon's]",
)
@click.option("--output-dir", type=FOLDER, help="Folder for the files.  [default: .]")
@click.option("--no-fetch", is_flag=True, help="Leave the files in the daemon's store.")
@common_options
def command(
    selection: Selection,
    duration: int | None,
    with_stack: bool,
    buffer_limit: int | None,
    no_attach: bool,
    keep_agent: int | None,
    output_dir: Path | None,
    no_fetch: bool,
) -> int:
    """Take a CUDA memory snapshot of running PyTorch processes and download it.

    \b
    kinetoctl memory --pid 1234
    kinetoctl memory --rank 0-7 --duration 30s --with-stack

    Torch records allocations and frees for --duration, then writes what is allocated where, which pauses the
    process briefly. The file is the pickle of torch.cuda.memory._dump_snapshot: `kinetoctl web FILE` shows it and
    `kinetoctl report FILE` prints its figures; https://pytorch.org/memory_viz and `python -m torch.cuda._memory_viz`
    open it, too.
    """
    settings = current()
    spec = pb.CaptureSpec(
        selector=required(selection).to_proto(),
        duration_ns=duration or DEFAULT_DURATION_NS,
        activity_types=[ACTIVITY_TYPE],
        options=pb.Options(with_stack=with_stack),
        buffer_limit_bytes=buffer_limit or 0,
        recorder=RECORDERS["agent"],  # libkineto's own way leaves a thread behind that never rests
        no_attach=no_attach,
        keep_agent_ns=keep_agent,
    )
    directory = None if no_fetch else prepare_folder(output_dir or Path())
    request = TraceRequest(spec=spec, idempotency_key=uuid.uuid4().hex, directory=directory)
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        return run_trace(client, request, settings).exit_code()
