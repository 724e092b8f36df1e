"""Addresses, limits and secrets of uploads."""

import io
from pathlib import Path

import pytest
from kineto_trace.store.object_stores import scheme_of
from kinetod.base.object_store_urls import capture_url, checked_endpoint, checked_url, missing_package
from kinetod.uploads.upload_job import Throttle
from kinetod.uploads.upload_worker import Worker
from kinetod.uploads.worker_protocol import WorkerOptions, credential_variables, secrets_of


@pytest.mark.parametrize("text", ["s3://b", "s3://b/p/q", "gs://b/p", "az://c/p", "file:///mnt/t", ""])
def test_usual_urls_are_taken(text: str) -> None:
    assert checked_url(text) == text
    assert checked_url(f"{text}/") == text if text else True


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("bucket/p", "expected s3://"),
        ("ftp://h/p", "expected s3://"),
        ("file:/swd", "expected s3://"),
        ("S3://b/p", "expected s3://"),
        ("s3", "is not a valid bucket"),
        ("s3://b/p\n", "expected s3://"),
        ("s3://key:secret@b/p", "contains a user or key"),
        ("s3://b/p?x=1", "has a query or fragment"),
        ("s3://b/../c", "contains .."),
        ("s3:///p", "is not a valid bucket"),
        ("file://host/p", "file:///absolute/path"),
        ("file:///", "file:///absolute/path"),
    ],
)
def test_other_urls_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        checked_url(text)


def test_endpoints_are_http_and_have_no_key() -> None:
    assert checked_endpoint("https://minio:9000/") == "https://minio:9000"
    assert checked_endpoint("") == ""
    for text in ("minio:9000", "https://a:b@minio", "https://"):
        with pytest.raises(ValueError, match="expected https"):
            checked_endpoint(text)


def test_a_missing_library_is_named_with_its_extra() -> None:
    assert missing_package("file:///x") == missing_package("") == missing_package("s3://b") == ""


def test_a_capture_cannot_leave_its_prefix() -> None:
    assert capture_url("s3://b/p", "gpu-7", "2026-1") == "s3://b/p/gpu-7/2026-1"
    assert capture_url("s3://b", "../x", "..") == "s3://b/_x/_"
    assert scheme_of("s3://b") == "s3"


def test_a_throttle_lets_the_mean_rate_through() -> None:
    now, slept = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    throttle = Throttle(1000, clock=lambda: now[0], sleep=sleep)
    for _ in range(3):
        throttle.take(2500)
    assert slept == [1.0, 1.0, 0.5, 1.0, 1.0, 0.5]
    Throttle(0, sleep=sleep).take(10**12)
    assert len(slept) == 6


def test_what_one_user_has_paid_for_holds_up_no_other() -> None:
    now, slept = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    throttle = Throttle(1000, clock=lambda: now[0], sleep=sleep)
    ada, bob = throttle.share("1001"), throttle.share("1002")
    ada.take(10**9)  # a file that goes in one piece
    bob.take(500)
    assert slept == []
    bob.take(500)  # half of the rate is bob's
    assert slept == [1.0]


def test_secrets_are_variables_that_sound_like_them() -> None:
    secrets = secrets_of({"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "HOME": "/root", "KEY_FILE": "/etc/key"})
    others = {"API_TOKEN": "sixsix", "SORT_KEY": "short", "GOOGLE_APPLICATION_CREDENTIALS": "/nowhere"}
    assert secrets_of(others) == {"sixsix"}
    assert secrets == {"wJalrXUtnFEMI"}


def test_secrets_in_credential_files_are_known(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("[default]\naws_access_key_id = AKIA12345\naws_secret_access_key = abcdefgh\n")
    assert credential_variables("s3", path) == {"AWS_SHARED_CREDENTIALS_FILE": str(path)}
    assert secrets_of(credential_variables("s3", path)) == {"AKIA12345", "abcdefgh"}
    path.write_text("AccountKey=xyz\n")
    assert credential_variables("az", path) == {"AZURE_STORAGE_CONNECTION_STRING": "AccountKey=xyz"}
    assert credential_variables("file", path) == {}


def test_secrets_of_a_renewal_are_hidden_like_those_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text("aws_secret_access_key = first-secret-of-all\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    worker = Worker(io.BytesIO(), WorkerOptions())
    file.write_text("aws_secret_access_key = second-secret-of-all\n")
    problem = worker._problem(OSError("first-secret-of-all, second-secret-of-all"))
    assert problem["error"] == "OSError: (hidden), (hidden)"


def test_the_password_of_a_proxy_is_a_secret() -> None:
    found = secrets_of({"HTTPS_PROXY": "http://user:hunter2%20secret@proxy:3128", "no_proxy": "a.example"})
    assert found == {"hunter2%20secret", "hunter2 secret", "dXNlcjpodW50ZXIyIHNlY3JldA=="}
