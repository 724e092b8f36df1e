"""What `captures pin` and `captures unpin` do."""

from collections.abc import Sequence

from kinetoctl.base.common_options import current
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import say
from kinetoctl.output.json_yaml import emit


def pin_all(capture_ids: Sequence[str], *, pinned: bool) -> ExitCode:
    """Pins or unpins them, and says so."""
    settings = current()
    word = "pinned" if pinned else "unpinned"
    done = []
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        for capture_id in capture_ids:
            client.pin(capture_id, pinned=pinned)
            done.append(capture_id)
            if settings.output == "table":
                say(f"{capture_id} {word}")
    if settings.output != "table":
        emit({word: done}, settings.output)
    return ExitCode.DONE
