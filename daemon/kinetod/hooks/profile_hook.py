"""The hook that pushes a capture's profiles to an OTLP receiver or Pyroscope: `hooks.profiles`."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from kineto_trace.store.output_formats import SUFFIXES

from kinetod.base.http_headers import headers_in, secrets_in
from kinetod.base.safe_text import redacted
from kinetod.config.settings import Config
from kinetod.hooks.command_hook import last_line, run_program
from kinetod.hooks.hook_types import FOLDER_VARIABLE, Ended, HookOutcome, HookResult
from kinetod.hooks.http_post import ReceiverAnswer
from kinetod.hooks.profile_sender import ProfileDelivery
from kinetod.supervise import child

_COMMAND = child.python("kinetod.hooks.profile_sender")
_OWN_S = 2.0  # additional time for the process itself


class ProfileHook:
    """Sends one message for each target with a trace. Created anew for each capture, so it knows what it has sent."""

    kind = "profiles"

    def __init__(self, config: Config) -> None:
        self._config = config
        self.name = config.hook_profiles
        self._sent: set[str] = set()

    async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
        """See Hook."""
        config = self._config
        delivery = ProfileDelivery(
            address=config.hook_profiles,
            folder=ended.variables[FOLDER_VARIABLE],
            headers_file=str(config.hook_profiles_headers or ""),
            ca_file=str(config.hook_profiles_ca or ""),
            timeout_s=timeout_s,
            memory_bytes=config.decode_memory_bytes,
            sandbox=config.decode_sandbox,
            targets=_with_trace(ended.body),
            sent=sorted(self._sent),
        )
        try:
            data = json.dumps(asdict(delivery)).encode() + b"\n"
            found = await run_program(_COMMAND, data, os.environ, timeout_s + _OWN_S)
        except OSError as exc:
            return HookOutcome(result=HookResult.FAILED, text=f"cannot be called: {exc}", again=True)
        answer = self._read(found.output)
        if found.status is None:
            return HookOutcome(result=HookResult.TIMEOUT, text=f"did not answer within {timeout_s:g} s", again=True)
        if answer is None:
            text = f"cannot be called: its process ended with status {found.status}{last_line(found.output)}"
            return HookOutcome(result=HookResult.FAILED, text=self._without_secrets(text), again=True)
        if not answer.text:
            return HookOutcome(result=HookResult.OK)
        text = self._without_secrets(answer.text)  # a receiver may repeat a header
        return HookOutcome(result=HookResult.FAILED, text=text, again=answer.again, after_s=answer.after_s)

    def _read(self, output: bytes) -> ReceiverAnswer | None:
        """Notes which targets were sent, and returns the outcome, if there is one."""
        answer = None
        for line in output.splitlines():
            try:
                told = json.loads(line)
                if "sent" in told:
                    self._sent.add(str(told["sent"]))
                else:
                    answer = ReceiverAnswer(**told)
            except (ValueError, TypeError):
                continue  # a line from elsewhere, such as a library's warning
        return answer

    def _without_secrets(self, text: str) -> str:
        return redacted(text, _secrets(self._config.hook_profiles_headers))


def _with_trace(body: bytes) -> list[str]:
    """Returns the names of the folders of targets with a trace."""
    return [
        f"{target['pid']}-{target['start_time_ns']}"
        for target in json.loads(body)["targets"]
        if any(file["format"] in SUFFIXES for file in target["files"])
    ]


def _secrets(path: Path | None) -> frozenset[str]:
    try:
        return frozenset(secrets_in(headers_in(path.read_bytes()) if path is not None else {}))
    except (OSError, ValueError):
        return frozenset()
