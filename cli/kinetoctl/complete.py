"""What a shell offers after Tab: pids and capture ids from the daemon; nothing if it is not there."""

from click.shell_completion import CompletionItem
from kineto_protos import endpoints
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client import Client
from kinetoctl.errors import CliError

COMPLETION_TIMEOUT_S = 1.0  # a Tab must not hang
MAX_CAPTURES = 50


def pids(incomplete: str) -> list[CompletionItem]:
    """Processes with an agent whose pid starts like this."""
    try:
        with Client(endpoints.rpc_address(), timeout_s=COMPLETION_TIMEOUT_S) as client:
            found = client.processes(pb.Selector())
    except CliError:
        return []
    return [CompletionItem(str(p.pid), help=" ".join(p.command)) for p in found if str(p.pid).startswith(incomplete)]


def capture_ids(incomplete: str) -> list[CompletionItem]:
    """Latest captures whose id starts like this."""
    try:
        with Client(endpoints.rpc_address(), timeout_s=COMPLETION_TIMEOUT_S) as client:
            found = [capture.id for capture in client.captures({}, limit=MAX_CAPTURES)]
    except CliError:
        return []
    return [CompletionItem(capture_id) for capture_id in found if capture_id.startswith(incomplete)]
