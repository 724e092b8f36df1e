"""Sends one webhook: `python -m kinetod.hooks.webhook_sender`, a separate process, since resolving names may hang for
long.

Standard input has one line of JSON (Delivery) and then the body; standard output gets one line of JSON (Answer).
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from kinetod import __version__
from kinetod.base import http_headers
from kinetod.hooks.http_post import ReceiverAnswer, post
from kinetod.sandbox.confinement import die_with_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What to send, and where. secret_file, ca_file: a path, or empty."""

    url: str
    message_id: str
    secret_file: str = ""
    ca_file: str = ""
    timeout_s: float = 30.0


def deliver(delivery: Delivery, body: bytes, now: int) -> ReceiverAnswer:
    """One POST. now: Unix seconds."""
    try:
        secret = (
            http_headers.webhook_secret_in(Path(delivery.secret_file).read_bytes()) if delivery.secret_file else None
        )
    except (OSError, ValueError) as exc:
        return ReceiverAnswer(text=f"the secret file {delivery.secret_file} cannot be used: {exc}", again=True)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"kinetod/{__version__}",
        **http_headers.signed_headers(secret, delivery.message_id, now, body),
    }
    return post(delivery.url, body, headers, ca_file=delivery.ca_file, timeout_s=delivery.timeout_s)[0]


def main(stdin: IO[bytes], stdout: IO[str]) -> int:
    """Carries out the request on standard input."""
    delivery = Delivery(**json.loads(stdin.readline()))
    stdout.write(json.dumps(asdict(deliver(delivery, stdin.read(), int(time.time())))) + "\n")
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.stdin.buffer, sys.stdout))
