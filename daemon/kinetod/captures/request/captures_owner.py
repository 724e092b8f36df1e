"""Whose a capture is, and the keys by which its owner makes it once."""

import os
from typing import NamedTuple

from kinetod.permissions.role_policy import Caller


class OwnersKey(NamedTuple):
    """An idempotency key, scoped to its owner."""

    text: str
    owner_uid: int

    @property
    def stored(self) -> str:
        """The key as the index has it; "" for none."""
        return f"{self.owner_uid}:{self.text}" if self.text else ""


def owner_of(caller: Caller) -> int:
    """The uid that owns the caller's captures; the daemon's own for a certificate that maps to no user."""
    return os.geteuid() if caller.uid is None else caller.uid
