"""The hook that sends a request to a URL: `hooks.webhook`."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from kinetod.base.safe_text import redacted
from kinetod.hooks.command_hook import last_line
from kinetod.hooks.hook_types import Ended, HookOutcome, HookResult
from kinetod.hooks.http_post import ReceiverAnswer
from kinetod.hooks.program_run import run_program
from kinetod.hooks.webhook_sender import Delivery
from kinetod.supervise import child

_COMMAND = child.python("kinetod.hooks.webhook_sender")
_OWN_S = 2.0  # that the process may take beside the request
_SECRET_CHARS = 16  # of a part of a path: chat services have their token there
_HIDDEN = "…"


class WebhookHook:
    """Sends a POST with the capture's JSON."""

    kind = "webhook"

    def __init__(self, url: str, secret_file: Path | None, ca_file: Path | None) -> None:
        self._url = url
        self._secret_file = secret_file
        self._ca_file = ca_file
        parts = urlsplit(url)
        segments = parts.path.split("/")
        shown = "/".join(_HIDDEN if len(each) >= _SECRET_CHARS else each for each in segments)
        self.name = f"{parts.scheme}://{parts.netloc}{shown}"  # without what is not for the log
        values = [value for _, value in parse_qsl(parts.query)]
        hidden = {parts.query, *values, *(quote(value) for value in values)}
        hidden |= {each for each in segments if len(each) >= _SECRET_CHARS}
        self._hidden = frozenset(each for each in hidden if each)

    async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
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
            return HookOutcome(result=HookResult.FAILED, text=f"cannot be called: {exc}", again=True)
        if found.status is None:
            return HookOutcome(result=HookResult.TIMEOUT, text=f"did not answer within {timeout_s:g} s", again=True)
        try:
            answer = ReceiverAnswer(**json.loads(found.output.splitlines()[-1]))
        except (ValueError, TypeError, IndexError):
            text = f"cannot be called: its process ended with status {found.status}{last_line(found.output)}"
            return HookOutcome(result=HookResult.FAILED, text=text, again=True)
        if not answer.text:
            return HookOutcome(result=HookResult.OK)
        text = redacted(answer.text, self._hidden)  # a receiver may say the address again
        return HookOutcome(result=HookResult.FAILED, text=text, again=answer.again, after_s=answer.after_s)
