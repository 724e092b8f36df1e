"""The hook that is an address: `hooks.webhook`."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from kinetod import child
from kinetod.hooks.command import last_line
from kinetod.hooks.interface import Ended, Outcome, Result
from kinetod.hooks.post import Answer, Delivery
from kinetod.hooks.program import run_program
from kinetod.text import clean

_COMMAND = child.python("kinetod.hooks.post")
_MAX_TEXT_CHARS = 500
_OWN_S = 2.0  # that the process may take beside the request


class WebhookHook:
    """Sends a POST with the capture's JSON."""

    kind = "webhook"

    def __init__(self, url: str, secret_file: Path | None, ca_file: Path | None) -> None:
        self._url = url
        self._secret_file = secret_file
        self._ca_file = ca_file
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path}"  # a query may hold what is not for the log

    async def call(self, ended: Ended, timeout_s: float) -> Outcome:
        """See Hook."""
        delivery = Delivery(
            url=self._url,
            message_id=ended.capture_id,
            secret_file=str(self._secret_file or ""),
            ca_file=str(self._ca_file or ""),
            timeout_s=timeout_s,
        )
        data = json.dumps(asdict(delivery)).encode() + b"\n" + ended.body
        try:
            found = await run_program(_COMMAND, data, os.environ, timeout_s + _OWN_S)
        except OSError as exc:
            return Outcome(result=Result.FAILED, text=f"cannot be called: {exc}", again=True)
        if found.status is None:
            return Outcome(result=Result.TIMEOUT, text=f"did not answer within {timeout_s:g} s", again=True)
        try:
            answer = Answer(**json.loads(found.output.splitlines()[-1]))
        except (ValueError, TypeError, IndexError):
            text = f"cannot be called: its process ended with status {found.status}{last_line(found.output)}"
            return Outcome(result=Result.FAILED, text=text, again=True)
        if not answer.text:
            return Outcome(result=Result.OK)
        text = clean(answer.text, _MAX_TEXT_CHARS)
        return Outcome(result=Result.FAILED, text=text, again=answer.again, after_s=answer.after_s)
