"""What the HTTP client raises: lost contact, and the server's refusals as RFC 9457 tells them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


class TidewrightError(Exception):
    """Base of what the client raises."""


class LostContact(TidewrightError):
    """Nobody answered within ``retry_seconds``. Whatever runs goes on; only the view of it is lost."""

    def __init__(self, server: str, cause: str) -> None:
        super().__init__(f"no contact with {server}: {cause}")
        self.server = server
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidField:
    """One thing wrong with a request: a JSON pointer ("" for the whole), what is wrong, what is allowed."""

    field: str
    detail: str
    way_out: str


class RequestRefused(TidewrightError):
    """The server understood and said no (RFC 9457). ``code`` is the last word of the problem's ``type``."""

    def __init__(
        self, *, status: int, code: str, title: str, detail: str, errors: Sequence[InvalidField] = ()
    ) -> None:
        super().__init__(detail or title)
        self.status = status
        self.code = code
        self.title = title
        self.detail = detail
        self.errors = tuple(errors)

    @classmethod
    def from_response(cls, response: httpx.Response) -> "RequestRefused":
        """From a response whose body has been read; anything that is no problem document is quoted briefly."""
        try:
            body: Any = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            text = response.text.strip()[:200] or response.reason_phrase
            return cls(status=response.status_code, code="http", title=response.reason_phrase, detail=text)
        errors = [
            InvalidField(
                field=str(item.get("field", "")),
                detail=str(item.get("detail", "")),
                way_out=str(item.get("way_out", "")),
            )
            for item in body.get("errors") or ()
            if isinstance(item, dict)
        ]
        return cls(
            status=response.status_code,
            code=str(body.get("type", "")).rpartition(":")[2],
            title=str(body.get("title", response.reason_phrase)),
            detail=str(body.get("detail", "")),
            errors=errors,
        )
