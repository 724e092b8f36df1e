"""What the daemon has decided about, as the parts that attach get it."""

from kinetod.attach.attach_types import Approval
from kinetod.attach_helper import messages
from kinetod.processes import credentials
from kinetod.processes.credentials import Credentials

PLAIN = Credentials(uids=(1000,) * 4, gids=(1000,) * 4, capabilities=0, dumpable=True)
APPROVAL = Approval(PLAIN)


def approval_of(pid: int, *, administrator: bool = True) -> Approval:
    """The approval that fits a process as it is."""
    return Approval(credentials.read(pid), administrator)


def message_of(pid: int) -> messages.Approved:
    """The same approval as a message."""
    found = credentials.read(pid)
    return messages.Approved(
        uids=(found.uids[0], found.uids[1], found.uids[2], found.uids[3]),
        gids=(found.gids[0], found.gids[1], found.gids[2], found.gids[3]),
        capabilities=found.capabilities,
        dumpable=found.dumpable,
        user_namespace=found.user_namespace,
        executable=found.executable,
        program=found.program,
    )
