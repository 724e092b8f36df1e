import pytest
from kinetod.config.profile_addresses import ProfileForm, checked_profiles, parse_profiles


@pytest.mark.parametrize(
    ("text", "form", "url", "secure"),
    [
        ("otlp+https://c:4318", ProfileForm.OTLP_HTTP, "https://c:4318/v1development/profiles", True),
        ("otlp+https://c/otlp/", ProfileForm.OTLP_HTTP, "https://c/otlp/v1development/profiles", True),
        ("otlp+http://127.0.0.1:1/v1development/profiles", ProfileForm.OTLP_HTTP,
         "http://127.0.0.1:1/v1development/profiles", False),
        ("otlp+grpcs://c:4317", ProfileForm.OTLP_GRPC, "c:4317", True),
        ("otlp+grpc://[::1]:4317/", ProfileForm.OTLP_GRPC, "[::1]:4317", False),
        ("pyroscope+https://p:4040", ProfileForm.PYROSCOPE, "https://p:4040/push.v1.PusherService/Push", True),
        ("pyroscope+http://localhost:4040/x", ProfileForm.PYROSCOPE,
         "http://localhost:4040/x/push.v1.PusherService/Push", False),
    ],
)  # fmt: skip
def test_an_address_says_what_is_sent_where(text: str, form: ProfileForm, url: str, secure: bool) -> None:
    found = parse_profiles(text)
    assert (found.form, found.url, found.secure) == (form, url, secure)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https://c:4318", r"expected otlp\+https://host:4318, otlp\+grpcs://host:4317 or pyroscope"),
        ("otlp+https://", "expected otlp"),
        ("otlp+https://c :4318", "expected otlp"),
        ("otlp+https://me:secret@c", "hooks.profiles_headers"),
        ("otlp+https://c?key=1", "has a query or fragment"),
        ("otlp+https://c:99999", "out of range"),
        ("otlp+http://c:4318", r"would leave this host unencrypted; use otlp\+https://"),
        ("otlp+grpc://c:4317", r"use otlp\+grpcs://"),
        ("otlp+grpcs://c", "host:port without a path"),
        ("otlp+grpcs://c:1/x", "host:port without a path"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write_instead(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        checked_profiles(text)


def test_empty_is_nowhere() -> None:
    assert checked_profiles("") == ""
