"""Signatures and tokens: what verifies, what does not, and the key file."""

import stat
import threading
from pathlib import Path

import pytest

from shared.errors import Rejected
from shared.settings import SettingsError
from shared.signing import (
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    InternalRequest,
    is_same_token,
    load_signing_key,
    sample_token,
    trainer_token,
)

KEY = bytes(range(32))
NOW = 1_900_000_000.5
REQUEST = InternalRequest(method="GET", target="/internal/jobs/j1/logs?tail=5", body=b"{}")


def headers_of(request: InternalRequest = REQUEST, key: bytes = KEY) -> dict[str, str]:
    return {name.lower(): value for name, value in request.signed_headers(key, now_seconds=NOW).items()}


@pytest.mark.parametrize("seconds", [0, 59, -59])
def test_a_signed_request_verifies_within_its_window(seconds: float) -> None:
    REQUEST.verify(KEY, headers_of(), now_seconds=NOW + seconds)


@pytest.mark.parametrize("seconds", [62, -62, 1e9])
def test_outside_its_window_it_does_not(seconds: float) -> None:
    with pytest.raises(Rejected, match="too old"):
        REQUEST.verify(KEY, headers_of(), now_seconds=NOW + seconds)


@pytest.mark.parametrize(
    "other",
    [
        InternalRequest(method="POST", target=REQUEST.target, body=REQUEST.body),
        InternalRequest(method="GET", target="/internal/jobs/j1/logs?tail=6", body=REQUEST.body),
        InternalRequest(method="GET", target=REQUEST.target, body=b"{ }"),
    ],
)
def test_another_method_target_or_body_does_not(other: InternalRequest) -> None:
    with pytest.raises(Rejected, match="not signed"):
        other.verify(KEY, headers_of(), now_seconds=NOW)


def test_another_key_or_timestamp_does_not() -> None:
    with pytest.raises(Rejected):
        REQUEST.verify(bytes(32), headers_of(), now_seconds=NOW)
    moved = {**headers_of(), TIMESTAMP_HEADER.lower(): str(int(NOW) + 1)}
    with pytest.raises(Rejected):
        REQUEST.verify(KEY, moved, now_seconds=NOW)


@pytest.mark.parametrize("timestamp", ["", "x", "-5", "1e9", "²", "9" * 400])
def test_nonsense_is_refused_and_crashes_nothing(timestamp: str) -> None:
    for headers in ({}, {TIMESTAMP_HEADER.lower(): timestamp, SIGNATURE_HEADER.lower(): "é"}):
        with pytest.raises(Rejected) as caught:
            REQUEST.verify(KEY, headers, now_seconds=NOW)
        assert caught.value.status == 401


def test_tokens_differ_by_purpose_job_and_attempt_and_are_made_again_alike() -> None:
    tokens = [
        trainer_token(KEY, "j1"),
        trainer_token(KEY, "j2"),
        sample_token(KEY, "j1", 1),
        sample_token(KEY, "j1", 2),
        sample_token(KEY, "j1:1", 1),
        trainer_token(bytes(32), "j1"),
    ]
    assert len(set(tokens)) == len(tokens)
    assert trainer_token(KEY, "j1") == tokens[0]
    assert is_same_token(tokens[0], trainer_token(KEY, "j1"))
    assert not is_same_token(tokens[0], tokens[1])


def test_the_key_file_is_made_once_for_all_who_ask_at_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "signing.key"
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(load_signing_key(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert len(found[0]) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["signing.key"]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("ab" * 32, 0o640, "readable by its owner only"),
        ("xyz", 0o600, "64 hexadecimal digits"),
        ("ab" * 31, 0o600, "at least 64 hexadecimal digits"),
    ],
)
def test_a_bad_key_file_is_one_clear_line(tmp_path: Path, content: str, mode: int, message: str) -> None:
    path = tmp_path / "signing.key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=message):
        load_signing_key(path)
