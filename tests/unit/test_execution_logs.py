"""Logs: lines, tails and cursors."""

import asyncio
import os
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.vocabulary import JobId, NodeName
from services.execution.core.state import Member
from services.execution.http.cursors import from_cursor, to_cursor
from services.execution.http.logs import JobLogs, LogRequest, split_lines, stream_logs, tail_offset
from services.execution.local.watched import LedgerEnd, read_ledger_end
from services.execution.settings import ExecutionSettings
from shared.errors import Rejected


@given(st.dictionaries(st.integers(0, 10_000), st.integers(1, 2**60), max_size=20))
def test_cursor_round_trip(offsets: dict[int, int]) -> None:
    assert from_cursor(to_cursor(offsets)) == offsets


@pytest.mark.parametrize("cursor", ["%", "abc", "MS0yLTM", "é", "A" * 70_000, "Zy14"])
def test_bad_cursor_is_the_callers_mistake(cursor: str) -> None:
    with pytest.raises(Rejected) as caught:
        from_cursor(cursor)
    assert (caught.value.status, caught.value.field) == (400, "/cursor")


@given(st.lists(st.binary(max_size=8), max_size=8), st.booleans(), st.integers(1, 40))
def test_lines_are_whole_and_none_is_lost(parts: list[bytes], is_complete: bool, piece: int) -> None:
    """Read piece by piece as a log grows: the lines are those of the whole, in order, each once."""
    content = b"\n".join(part.replace(b"\n", b"").replace(b"\r", b"") for part in parts)
    offset, lines = 0, []
    for size in [*range(0, len(content), piece), len(content)]:
        grown, last = content[:size], is_complete and size == len(content)
        found, used = split_lines(grown[offset:], is_complete=last, line_bytes_max=1 << 20)
        lines += [line for line, _ in found]
        offset += used
    found, used = split_lines(content[offset:], is_complete=is_complete, line_bytes_max=1 << 20)
    lines += [line for line, _ in found]
    expected = content.split(b"\n")
    if not is_complete or expected[-1] == b"":
        expected = expected[:-1]
    assert lines == expected


def test_line_that_never_ends_is_cut() -> None:
    assert split_lines(b"x" * 10, is_complete=False, line_bytes_max=11) == ([], 0)
    assert split_lines(b"x" * 10, is_complete=False, line_bytes_max=10) == ([(b"x" * 10, 10)], 10)


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\n\n", b"x" * 70_000 + b"\ny\nz\n"])
@pytest.mark.parametrize("lines", [0, 1, 2, 5])
def test_tail_begins_at_the_right_line(tmp_path: Path, content: bytes, lines: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    whole = content.splitlines(keepends=True)
    assert content[tail_offset(path, lines, line_bytes_max=1 << 20) :] == b"".join(
        whole[len(whole) - min(lines, len(whole)) :]
    )


@given(st.lists(st.integers(0, 9), max_size=6), st.booleans(), st.integers(1, 4), st.integers(1, 12))
def test_a_tail_counts_a_long_line_as_it_is_told(
    lengths: list[int], is_ended: bool, line_bytes_max: int, lines: int
) -> None:
    told: list[bytes] = []
    for length in lengths:
        line = b"x" * length + b"\n"
        cuts = [*range(0, max(length, 1), line_bytes_max), len(line)]
        told += [line[begin:end] for begin, end in pairwise(cuts)]
    content = b"".join(told)
    if not is_ended and content.endswith(b"x\n"):
        content, told[-1] = content[:-1], told[-1][:-1]
    with NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        begin = tail_offset(Path(file.name), lines, line_bytes_max=line_bytes_max)
    assert content[begin:] == b"".join(told[-lines:])


async def test_a_tail_of_a_huge_line_is_bounded(tmp_path: Path) -> None:
    """Of a log of a gigabyte without any line end (here: a hole) the last lines are told, and little is held."""
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    settings = ExecutionSettings.load()
    request = LogRequest(follow=True, tail=2, offsets={}, member=None, as_text=True)
    tracemalloc.start()
    try:
        sent = [
            len(piece) async for piece in stream_logs(request, look=over, file_of=lambda _: path, settings=settings)
        ]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent == [settings.log_line_bytes_max + 1] * 2
    assert peak < 16 * settings.log_line_bytes_max


MEMBER = Member(
    job_id=JobId("j"), role="worker", index=0, incarnation=1, ordinal=1, attempt=1, nonce="n", node=NodeName("n")
)


async def over() -> JobLogs:
    return JobLogs(members=(MEMBER,), is_over=True)


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "folder", "zeros"]
)
async def test_what_a_worker_puts_in_the_place_of_its_log_is_no_log(
    tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    """A thread that opened a pipe would wait in it for ever, and there are few of them."""
    path = tmp_path / "log"
    make(path)
    for tail in (None, 5):
        request = LogRequest(follow=True, tail=tail, offsets={}, member=None, as_text=True)
        async with asyncio.timeout(5):
            sent = stream_logs(request, look=over, file_of=lambda _: path, settings=ExecutionSettings.load())
            assert [piece async for piece in sent] == []


def test_end_of_a_ledger_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert read_ledger_end(path) == LedgerEnd()
    path.write_text('{"k":"applied","step":7}\n{"k":"begun","step":8}\n{"k":"appl')
    assert read_ledger_end(path) == LedgerEnd(step=8)
    path.write_text("x" * 20_000 + '\n{"k":"applied","step":9}\n{"k":"finished","step":10}\n')
    assert read_ledger_end(path) == LedgerEnd(step=10, finished=True)
