"""Streams a job's logs: the workers' own files, read by offset, whether the workers still run or not."""

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from schemas.vocabulary import MemberName
from services.execution.core.state import Member, MemberState
from services.execution.http.cursors import to_cursor
from services.execution.settings import ExecutionSettings

_TAIL_CHUNK_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLogs:
    """Whose logs there are. ``is_over``: nothing more will be written, and nobody will be started."""

    members: Sequence[Member]
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """``tail``: so many last lines of each member; None: from ``offsets``, by default from the start."""

    follow: bool
    tail: int | None
    offsets: dict[int, int]
    member: str | None
    as_text: bool


async def stream_logs(
    request: LogRequest,
    *,
    look: Callable[[], Awaitable[JobLogs]],
    file_of: Callable[[MemberName], Path],
    settings: ExecutionSettings,
) -> AsyncIterator[bytes]:
    """Lines as they stand, member by member; with ``follow``, until the job is over and everything was sent.

    A last line without its end is held back while its worker may still write it.
    """
    offsets = dict(request.offsets)
    tailed: set[int] = set()
    while True:
        logs = await look()
        chosen = [m for m in logs.members if request.member is None or _names(m, request.member)]
        sent = False
        for member in chosen:
            if request.tail is not None and member.ordinal not in tailed | request.offsets.keys():
                tailed.add(member.ordinal)
                start = await asyncio.to_thread(
                    tail_offset, file_of(member.name), request.tail, line_bytes_max=settings.log_line_bytes_max
                )
                offsets.setdefault(member.ordinal, start)
            async for piece in _read_member(member, offsets, request, file_of(member.name), settings):
                sent = True
                yield piece
        if sent:
            continue
        if not request.follow or logs.is_over:
            return
        await asyncio.sleep(settings.log_poll_seconds)


async def _read_member(
    member: Member, offsets: dict[int, int], request: LogRequest, path: Path, settings: ExecutionSettings
) -> AsyncIterator[bytes]:
    """Whole lines from the offset on, a chunk at a time; the offset moves with them."""
    is_complete = member.state is MemberState.GONE or not request.follow
    while True:
        offset = offsets.get(member.ordinal, 0)
        chunk = await asyncio.to_thread(_read_at, path, offset, settings.log_chunk_bytes)
        lines, used = split_lines(chunk, is_complete=is_complete, line_bytes_max=settings.log_line_bytes_max)
        if used == 0 and len(chunk) == settings.log_chunk_bytes:
            chunk = await asyncio.to_thread(_read_at, path, offset, settings.log_line_bytes_max)
            lines, used = split_lines(chunk, is_complete=is_complete, line_bytes_max=settings.log_line_bytes_max)
        if used == 0:
            return
        pieces: list[bytes] = []
        for line, end in lines:
            offsets[member.ordinal] = offset + end
            pieces.append(_piece(member, line, offsets, as_text=request.as_text))
        yield b"".join(pieces)


def split_lines(chunk: bytes, *, is_complete: bool, line_bytes_max: int) -> tuple[list[tuple[bytes, int]], int]:
    """Lines without their ends, each with the offset behind it; and how many bytes they take.

    What follows the last line end counts as a line if ``is_complete``, or if it is as long as a line may be.
    """
    lines: list[tuple[bytes, int]] = []
    start = 0
    while (end := chunk.find(b"\n", start)) >= 0:
        lines.append((chunk[start:end].removesuffix(b"\r"), end + 1))
        start = end + 1
    rest = chunk[start:]
    if rest and (len(rest) >= line_bytes_max or (is_complete and start == 0) or (is_complete and not lines)):
        lines.append((rest, len(chunk)))
        start = len(chunk)
    return lines, start


def tail_offset(path: Path, lines: int, *, line_bytes_max: int) -> int:
    """Where the last ``lines`` lines begin. Reads backwards, no more than needed.

    A longer line counts as so many lines as it is told in: what follows is bounded whatever was written.
    """
    descriptor = _open(path)
    if descriptor is None:
        return 0
    try:
        size = position = os.fstat(descriptor).st_size
        if lines <= 0:
            return size
        left, line_end = lines, size
        while position > 0:
            length = min(_TAIL_CHUNK_BYTES, position)
            position -= length
            chunk = os.pread(descriptor, length, position)
            place = len(chunk)
            while (place := chunk.rfind(b"\n", 0, place)) >= 0:
                begin = position + place + 1
                if begin == size:
                    line_end = position + place  # the end of the last line begins no further one
                    continue
                pieces = _pieces(line_end - begin, line_bytes_max)
                if pieces >= left:
                    return begin + (pieces - left) * line_bytes_max
                left, line_end = left - pieces, position + place
            if (
                position > 0 and line_end - position >= left * line_bytes_max
            ):  # one line, longer than all that is asked
                return line_end - left * line_bytes_max
        return max(0, _pieces(line_end, line_bytes_max) - left) * line_bytes_max
    finally:
        os.close(descriptor)


def _pieces(length: int, line_bytes_max: int) -> int:
    """How many lines a line of this length is told in; an empty one is one too."""
    return max(1, -(-length // line_bytes_max))


def _piece(member: Member, line: bytes, offsets: dict[int, int], *, as_text: bool) -> bytes:
    text = line.decode("utf-8", "replace")
    if as_text:
        return f"{text}\n".encode()
    value = {"member": member.name, "cursor": to_cursor(offsets), "line": text}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _names(member: Member, wanted: str) -> bool:
    """A member by its whole name, or by a part that begins it: role, role/index."""
    short = member.name.partition("/")[2]
    return wanted in (member.name, short) or short.startswith(f"{wanted}/") or member.name.startswith(f"{wanted}/")


def _read_at(path: Path, offset: int, count: int) -> bytes:
    descriptor = _open(path)
    if descriptor is None:
        return b""
    try:
        return os.pread(descriptor, count, offset)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _open(path: Path) -> int | None:
    """A file alone: to open a pipe that a worker put in its log's place would keep a thread for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None
