"""Keys and signatures: the installation's key, signed internal requests, trainer and sample tokens."""

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from shared.errors import Rejected
from shared.settings import SECRET_BYTES, SettingsError

TIMESTAMP_HEADER: Final = "Tide-Timestamp"
SIGNATURE_HEADER: Final = "Tide-Signature"
REQUEST_WINDOW_SECONDS: Final = 60
"""A signed request is good for so long, before and after its timestamp."""


def load_signing_key(path: Path) -> bytes:
    """The 256-bit key in ``path`` (hex); made with mode 0600 if there is no file, by one of all who ask at once.

    Raises SettingsError if the file is no key, or others may read it.
    """
    if not path.exists():
        _make_key_file(path)
    if path.stat().st_mode & 0o077:
        raise SettingsError(f"{path}: the signing key must be readable by its owner only: chmod 600 {path}")
    try:
        key = bytes.fromhex(path.read_text().strip())
    except ValueError as exc:
        raise SettingsError(f"{path}: the signing key must be {SECRET_BYTES * 2} hexadecimal digits") from exc
    if len(key) < SECRET_BYTES:
        raise SettingsError(f"{path}: the signing key must be at least {SECRET_BYTES * 2} hexadecimal digits")
    return key


def trainer_token(key: bytes, job_id: str) -> str:
    """What a trainer of this job shows to execution."""
    return _sign(key, f"trainer:{job_id}")


def sample_token(key: bytes, job_id: str, attempt: int) -> str:
    """What a trainer of this attempt shows to metrics."""
    return _sign(key, f"samples:{job_id}:{attempt}")


def is_same_token(expected: str, given: str) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalRequest:
    """The parts of an HTTP request between services that are signed; ``target`` is path and query as sent."""

    method: str
    target: str
    body: bytes = b""

    def signed_headers(self, key: bytes, *, now_seconds: float) -> dict[str, str]:
        """Headers to send. ``now_seconds``: wall clock since 1970."""
        timestamp = str(int(now_seconds))
        return {TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: _sign(key, self._text(timestamp))}

    def verify(self, key: bytes, headers: Mapping[str, str], *, now_seconds: float) -> None:
        """Raises Rejected (401) unless the headers were made by ``signed_headers`` within the window.

        ``headers`` is looked up by lower-case names, as Starlette's headers are.
        """
        timestamp = headers.get(TIMESTAMP_HEADER.lower(), "")
        signature = headers.get(SIGNATURE_HEADER.lower(), "")
        well_formed = timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 15
        if not well_formed or not is_same_token(_sign(key, self._text(timestamp)), signature):
            raise Rejected(401, "bad_signature", "the request is not signed by a service of this installation")
        if abs(now_seconds - int(timestamp)) > REQUEST_WINDOW_SECONDS:
            raise Rejected(401, "stale_signature", "the signature is too old: are the machines' clocks set?")

    def _text(self, timestamp: str) -> str:
        return "\n".join(("request", self.method.upper(), self.target, timestamp, sha256(self.body).hexdigest()))


def _sign(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), sha256).hexdigest()


def _make_key_file(path: Path) -> None:
    """Write beside, then link: whoever comes second keeps the first one's key, and nobody sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
