"""Where profiles are pushed: `hooks.profiles`, checked. Pure.

Theory of operation
    The scheme says what the receiver takes and how it is reached:

    - otlp+https://host:4318, otlp+http://…: OTLP over HTTP with protobuf. As with OTEL_EXPORTER_OTLP_ENDPOINT, the
      path is a prefix of the one that the protocol has for profiles
    - otlp+grpcs://host:4317, otlp+grpc://…: OTLP over gRPC
    - pyroscope+https://host:4040, pyroscope+http://…: Pyroscope's push call

    Those without TLS are for this host alone, like webhooks.
"""

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from kineto_protos.endpoints import is_loopback

OTLP_PATH = "/v1development/profiles"
PYROSCOPE_PATH = "/push.v1.PusherService/Push"
_EXPECTED = "otlp+https://host:4318, otlp+grpcs://host:4317 or pyroscope+https://host:4040"


class ProfileForm(StrEnum):
    """What is sent, and how."""

    OTLP_HTTP = "otlp-http"
    OTLP_GRPC = "otlp-grpc"
    PYROSCOPE = "pyroscope"


_SCHEMES = {
    "otlp+https": (ProfileForm.OTLP_HTTP, "https"),
    "otlp+http": (ProfileForm.OTLP_HTTP, "http"),
    "otlp+grpcs": (ProfileForm.OTLP_GRPC, "https"),
    "otlp+grpc": (ProfileForm.OTLP_GRPC, "http"),
    "pyroscope+https": (ProfileForm.PYROSCOPE, "https"),
    "pyroscope+http": (ProfileForm.PYROSCOPE, "http"),
}
_PATHS = {ProfileForm.OTLP_HTTP: OTLP_PATH, ProfileForm.PYROSCOPE: PYROSCOPE_PATH, ProfileForm.OTLP_GRPC: ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAddress:
    """One receiver. url: with the whole path; for gRPC host:port."""

    form: ProfileForm
    url: str
    secure: bool


def parse_profiles(text: str) -> ProfileAddress:
    """Parses an address. Raises ValueError, which says what is wrong."""
    parts = urlsplit(text)
    if parts.scheme not in _SCHEMES or not parts.hostname or not text.isprintable() or " " in text:
        raise ValueError(f"expected {_EXPECTED}, got {text!r:.80}")
    form, scheme = _SCHEMES[parts.scheme]
    if "@" in parts.netloc:
        raise ValueError("contains a user or password; put an Authorization header into hooks.profiles_headers")
    if parts.query or parts.fragment:
        raise ValueError("has a query or fragment (?… or #…); put keys into hooks.profiles_headers")
    try:
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"{text!r:.80}: {exc}") from None
    if scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{text!r:.80} would leave this host unencrypted; use {parts.scheme}s://…")
    if form is ProfileForm.OTLP_GRPC:
        if port is None or parts.path.strip("/"):
            raise ValueError(f"expected {parts.scheme}://host:port without a path, got {text!r:.80}")
        return ProfileAddress(form=form, url=parts.netloc, secure=scheme == "https")
    path = parts.path.rstrip("/")
    path = path if path.endswith(_PATHS[form]) else path + _PATHS[form]
    return ProfileAddress(form=form, url=f"{scheme}://{parts.netloc}{path}", secure=scheme == "https")


def checked_profiles(text: str) -> str:
    """Checks an address; "" is none. Raises ValueError."""
    if text:
        parse_profiles(text)
    return text
