"""Opaque cursors of logs: how far each member's log was read."""

import base64
import binascii
from collections.abc import Mapping

from shared.errors import Rejected

_LENGTH_MAX = 65_536


def to_cursor(offsets: Mapping[int, int]) -> str:
    """``offsets``: byte offset by a member's ordinal. Members at 0 are left out."""
    text = ".".join(f"{ordinal:x}-{offset:x}" for ordinal, offset in sorted(offsets.items()) if offset)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def from_cursor(cursor: str) -> dict[int, int]:
    """Inverse of ``to_cursor``. Raises Rejected (400)."""
    try:
        if len(cursor) > _LENGTH_MAX:
            raise ValueError
        padded = cursor + "=" * (-len(cursor) % 4)
        text = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii")
        pairs = [part.split("-") for part in text.split(".") if part]
        offsets = {int(ordinal, 16): int(offset, 16) for ordinal, offset in pairs}
        if any(value < 0 for value in (*offsets, *offsets.values())):
            raise ValueError
    except (ValueError, binascii.Error) as exc:
        raise Rejected(
            400,
            "bad_cursor",
            "this is no cursor of a log",
            field="/cursor",
            way_out="use the cursor of a line that was sent, or none to read from the start",
        ) from exc
    return offsets
