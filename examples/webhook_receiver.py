"""Receives kinetod's webhooks, verifies their signatures and prints a line for each process that was not recorded.

    openssl rand -base64 32 > secret; chmod 600 secret
    python examples/webhook_receiver.py --port 8099 --secret secret
    KINETOD_HOOKS_WEBHOOK=http://localhost:8099 KINETOD_HOOKS_WEBHOOK_SECRET=$PWD/secret kinetod

Between hosts the address must be https: put the receiver behind a proxy that has a certificate. A capture may come
twice, with the same webhook-id, and captures may come in any order.
"""

import argparse
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOLERANCE_S = 300  # how old a request may be, so that nobody can send it again later


def is_genuine(headers: Mapping[str, str], body: bytes, secret: bytes) -> bool:
    """Whether kinetod signed this request, and did so recently (Standard Webhooks, version 1)."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
    if not hmac.compare_digest(expected.encode(), headers["webhook-signature"].encode()):
        return False
    return abs(time.time() - int(headers["webhook-timestamp"])) < TOLERANCE_S


def lines(body: bytes) -> list[str]:
    """What to print about a capture: its status, then the processes that were not recorded as a whole."""
    capture = json.loads(body)
    found = [f"capture {capture['id']}: {capture['status'].removeprefix('CAPTURE_STATUS_')}"]
    for target in capture["targets"]:
        if target["verdict"] != "VERDICT_DONE":
            found.append(f"  pid {target['pid']}: {target['reason_code']}: {target['reason']}")
    return found


class Handler(BaseHTTPRequestHandler):
    """Answers kinetod. Every answer of 2xx ends its tries; 400 is final, too."""

    secret: bytes
    seen: set[str]

    def do_POST(self) -> None:
        """One capture that has ended."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        headers = {name: self.headers.get(name, "") for name in names}
        if not all(headers.values()) or not is_genuine(headers, body, self.secret):
            self.send_error(400, "the signature is missing, wrong or old")
            return
        if headers["webhook-id"] not in self.seen:
            self.seen.add(headers["webhook-id"])
            print("\n".join(lines(body)), flush=True)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Prints no line for each request."""


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description="Receives kinetod's webhooks.")
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--secret", type=Path, required=True, help="the file of hooks.webhook_secret")
    options = parser.parse_args()
    text = options.secret.read_text().strip()
    Handler.secret = base64.b64decode(text.removeprefix("whsec_")) if text.startswith("whsec_") else text.encode()
    Handler.seen = set()
    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
        print(f"listening on http://localhost:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
