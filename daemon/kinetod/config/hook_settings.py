"""The settings about hooks, as rows for the table of all settings."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from kinetod.base.webhook_signature import secret_in
from kinetod.config.setting import SettingSpec
from kinetod.config.settings import Config, is_loopback
from kinetod.config.value_kinds import (
    Choice,
    Count,
    Duration,
    ExistingFile,
    Kind,
    ListOf,
    Maybe,
    ParsedText,
    SecretFile,
)

ALL = "all"
STATUSES = ("done", "partial", "failed", "cancelled")
MAX_WEBHOOKS = 8


def checked_webhook(text: str) -> str:
    """Checks a webhook: an https address, or http on this host. Raises ValueError."""
    parts = urlsplit(text)
    if parts.scheme not in ("https", "http") or not parts.hostname or not text.isprintable() or " " in text:
        raise ValueError(f"expected https://host/path, got {text!r:.80}")
    if "@" in parts.netloc:
        raise ValueError("contains a user or password; to prove the sender, use hooks.webhook_secret")
    if parts.fragment:
        raise ValueError("has a fragment (#…), which is never sent")
    try:
        parts.port  # noqa: B018  # raises
    except ValueError as exc:
        raise ValueError(f"{text!r:.80}: {exc}") from None
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{text!r:.80} would leave this host unencrypted; use https://…")
    return text


HOOK_KEYS: tuple[SettingSpec, ...] = (
    SettingSpec(
        name="hooks.on",
        field="hook_on",
        kind=ListOf(Choice(ALL, *STATUSES)),
        meaning="which ends of captures trigger hooks: all, done, partial, failed, cancelled",
        reload=True,
    ),
    SettingSpec(
        name="hooks.command",
        field="hook_command",
        kind=ListOf(Kind()),
        meaning="program that is run when a capture has ended, and its arguments; it gets the capture's JSON on its "
        "standard input; empty: none",
        reload=True,
    ),
    SettingSpec(
        name="hooks.webhook",
        field="hook_webhooks",
        kind=ListOf(ParsedText("address", checked_webhook)),
        meaning="https addresses that get a POST with the capture's JSON when it has ended (http on this host only)",
        reload=True,
    ),
    SettingSpec(
        name="hooks.webhook_secret",
        field="hook_secret",
        kind=Maybe(SecretFile()),
        meaning="file with the secret that webhooks are signed with, or credential:NAME; empty: they are not signed",
        reload=True,
    ),
    SettingSpec(
        name="hooks.webhook_ca",
        field="hook_ca",
        kind=Maybe(ExistingFile()),
        meaning="file (PEM) with the authorities that the certificates of webhooks are checked against; empty: the "
        "system's",
        reload=True,
    ),
    SettingSpec(
        name="hooks.timeout",
        field="hook_timeout_ns",
        kind=Duration(),
        meaning="how long the command, or one attempt of a webhook, may take",
        reload=True,
    ),
    SettingSpec(
        name="hooks.retry_for",
        field="hook_retry_ns",
        kind=Duration(least_ns=0),
        meaning="how long a failing webhook is retried, with pauses that double from one second; 0: never",
        reload=True,
    ),
    SettingSpec(
        name="hooks.parallel",
        field="hook_parallel",
        kind=Count(1, 32),
        meaning="how many runs of the command, or calls to one address, may be in progress at a time; a user with "
        "none in progress gets one more",
        reload=True,
    ),
)


def hook_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Settings of hooks that cannot work."""
    if config.hook_command and (problem := _command_problem(config.hook_command[0])):
        yield "hooks.command", problem
    if len(config.hook_webhooks) > MAX_WEBHOOKS:
        yield "hooks.webhook", f"has {len(config.hook_webhooks)} addresses; at most {MAX_WEBHOOKS} are allowed"
    if config.hook_secret is not None:
        try:
            secret_in(config.hook_secret.read_bytes())
        except (OSError, ValueError) as exc:
            yield "hooks.webhook_secret", f"{config.hook_secret} {exc}"


def _command_problem(program: str) -> str:
    """Why the command cannot or must not be run; "" if it can."""
    path = Path(program)
    if not path.is_absolute():
        return f"{program!r:.80} is not an absolute path; PATH is not searched, and no shell is used"
    try:
        status = path.stat()
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    if not stat.S_ISREG(status.st_mode) or not os.access(path, os.X_OK, effective_ids=True):
        return f"{path} cannot be executed by this user (uid {os.geteuid()}); run chmod +x {path}"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be changed by everybody (mode {stat.S_IMODE(status.st_mode):04o}); run chmod o-w {path}"
    return ""
