"""Which GPUs a target used by the driver's word, beside the samples of their counters in its raw folder."""

from pathlib import Path
from typing import Annotated

import msgspec

from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.errors import SpoolError

_NAME = Path("raw", "gpus.json")  # in a target's folder
_MAX_BYTES = 1 << 20

Uuid = Annotated[str, msgspec.Meta(max_length=64)]


class TargetGpus(msgspec.Struct, frozen=True, kw_only=True):
    """contexts: UUIDs of the GPUs on which the process had a context, sampled or not.

    addresses: of these on the PCI bus, as the kernel writes them, as far as they are known. permitted_ns: of GPUs that
    others may begin to use, Unix time up to which the counters are the caller's. notes: what is missing of the
    counters, for people.
    """

    contexts: tuple[Uuid, ...] = ()
    addresses: dict[Uuid, Uuid] = {}  # msgspec copies it
    permitted_ns: dict[Uuid, int] = {}
    notes: tuple[str, ...] = ()

    def write(self, target_dir: Path) -> None:
        """Writes it into the target's raw folder, which exists. Raises OSError."""
        write_atomically(target_dir / _NAME, msgspec.json.encode(self))

    @staticmethod
    def read(target_dir: Path) -> "TargetGpus":
        """Reads what was written; nothing, if nothing was. Raises SpoolError."""
        try:
            with (target_dir / _NAME).open("rb") as file:
                return _GPUS.decode(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return TargetGpus()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise SpoolError(f"{target_dir / _NAME}: {exc}") from exc


# Made at import: msgspec crashes where two threads are the first to decode a type.
_GPUS = msgspec.json.Decoder(TargetGpus)
