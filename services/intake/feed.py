"""The feed of server-sent events: the log read once for all subscribers, and anew for whoever is far behind."""

import asyncio
import json
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.api.jobs import GapView
from schemas.envelope import Sequence as LogSequence
from schemas.vocabulary import JobId, TenantName, Topic
from services.intake.settings import IntakeSettings
from shared.bus.log import Headers, Partition, Position, Record
from shared.bus.postgres import end_of_log, read_page, trimmed_until
from shared.errors import Poison, TideError, Unavailable
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

HEARTBEAT: Final = b": heartbeat\n"
"""A comment line; no blank line, which some clients would take for an event."""
_TOPICS: Final = tuple(sorted(Topic))
_log = get_logger()


@dataclass
class TooManyStreams(TideError):
    """The limit of open event streams is reached: 429."""

    retry_after_seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One event, ready to be sent."""

    sequence: LogSequence
    key: str
    tenant: str
    topic: Topic
    block: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of the log: what it has, and the position behind it (also past what is not for anyone)."""

    items: tuple[Item, ...]
    end: LogSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Interest:
    """What a subscriber gets: events of its tenant and of the cluster; of one job only, if it says so."""

    tenant: TenantName
    job_id: JobId | None = None

    def wants(self, item: Item) -> bool:
        if self.job_id is not None:
            return item.key == self.job_id and item.tenant == self.tenant
        return item.tenant == self.tenant or item.topic is Topic.CAPACITY


class Feed:
    """One reader of the log per process, awake only while somebody is subscribed.

    The latest events are kept in memory, at most twice ``stream_buffer_events_max``.
    """

    def __init__(
        self,
        *,
        read: Callable[[], AbstractAsyncContextManager[AsyncConnection]],
        wait_for_events: Callable[[float], Awaitable[None]],
        instruments: Instruments,
        settings: IntakeSettings,
    ) -> None:
        self._read = read
        self._wait_for_events = wait_for_events
        self._settings = settings
        self._items: list[Item] = []
        self._begin: LogSequence | None = None
        self._end: LogSequence | None = None
        self._news = asyncio.Event()
        self._subscribed = asyncio.Event()
        self._streams = 0
        self._open_streams = instruments.gauge("event_streams_info", "Open streams of server-sent events.")

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow the log until stopped. A database that is away is tried again; subscribers wait meanwhile."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_at(stopping))
            while not stopping.is_set():
                await self._subscribed.wait()
                if stopping.is_set():
                    return
                try:
                    is_more = await self._advance()
                except Unavailable as exc:
                    _log.warning("feed_unavailable", detail=str(exc))
                    await asyncio.sleep(exc.retry_after_seconds)
                    continue
                if not is_more:
                    await self._wait_for_events(self._settings.stream_poll_seconds)

    async def follow(self, interest: Interest, *, after: LogSequence | None) -> AsyncIterator[bytes]:
        """Blocks of the stream, without end: events behind ``after`` (None: from now on), gaps, heartbeats."""
        position, gap = await self._begin_at(after)
        yield b": connected\n\n" if gap is None else gap
        while True:
            news = self._news
            stretch = self._latest(position)
            if stretch is None:
                stretch = await self._look_up(position)
            blocks = [item.block for item in stretch.items if interest.wants(item)]
            is_at_end = not stretch.items and stretch.end <= position
            position = max(position, stretch.end)
            if blocks:
                yield b"".join(blocks)
            elif is_at_end and not await _comes(news, self._settings.stream_heartbeat_seconds):
                yield HEARTBEAT

    def check_room(self) -> None:
        """Raises TooManyStreams."""
        if self._streams >= self._settings.streams_max:
            raise TooManyStreams

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count one stream; the reader is awake while there is any."""
        self._streams += 1
        self._open_streams.set(self._streams)
        self._subscribed.set()
        try:
            yield
        finally:
            self._streams -= 1
            self._open_streams.set(self._streams)
            if not self._streams:
                self._subscribed.clear()
                self._forget()

    async def _wake_at(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._subscribed.set()

    # -- the reader -------------------------------------------------------------------------------------------

    async def _advance(self) -> bool:
        """Read on; True if there may be more at once."""
        end = self._end
        if end is None:
            async with self._reading() as connection:
                end = await end_of_log(connection)
            if not self._streams:
                return False
            self._begin = self._end = end
            # Whoever looked before the reader stood here looks again: events in between are in no memory.
            self._announce()
        stretch = await self._look_up(end)
        if self._end != end:  # the last subscriber has left meanwhile
            return False
        self._end = max(end, stretch.end)
        self._items.extend(stretch.items)
        self._trim()
        if stretch.items:
            self._announce()
        return len(stretch.items) >= self._settings.stream_page_events_max

    def _trim(self) -> None:
        limit = self._settings.stream_buffer_events_max
        if len(self._items) > 2 * limit:
            del self._items[:-limit]
            self._begin = self._items[0].sequence

    def _forget(self) -> None:
        self._items, self._begin, self._end = [], None, None

    def _announce(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -- for subscribers --------------------------------------------------------------------------------------

    async def _begin_at(self, after: LogSequence | None) -> tuple[LogSequence, bytes | None]:
        """Where a subscriber starts, and the gap event if it cannot start where it asked to."""
        async with self._reading() as connection:
            end = await end_of_log(connection)
            if after is None:
                return end, None
            trimmed = await trimmed_until(connection)
        if after < trimmed:
            return trimmed, gap_block(after, trimmed, "older than what is kept: events in between are lost")
        if after > end:
            return end, gap_block(after, end, "not a position of this log: it goes on from now")
        return after, None

    def _latest(self, position: LogSequence) -> Stretch | None:
        """From memory; None if it does not reach back so far."""
        if self._begin is None or self._end is None or position < self._begin:
            return None
        first = bisect_right(self._items, position, key=lambda item: item.sequence)
        limit = self._settings.stream_page_events_max
        items = tuple(self._items[first : first + limit])
        is_rest = first + limit >= len(self._items)
        return Stretch(items=items, end=max(position, self._end) if is_rest else items[-1].sequence)

    async def _look_up(self, position: LogSequence) -> Stretch:
        positions = {Partition(topic): Position(position) for topic in _TOPICS}
        async with self._reading() as connection:
            page = await read_page(connection, positions, limit=self._settings.stream_page_events_max)
        return Stretch(items=to_items(page.records), end=min(reached.sequence for reached in page.positions.values()))

    def _reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self._read()


async def _comes(news: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return False
    return True


def to_items(records: Sequence[Record]) -> tuple[Item, ...]:
    """What cannot be shown (no key, headers or payload that are no JSON) is left out: readers quarantine it."""
    items = (_to_item(record) for record in records)
    return tuple(item for item in items if item is not None)


def _to_item(record: Record) -> Item | None:
    try:
        headers = Headers.parse(record.headers)
        json.loads(record.payload)
    except (Poison, ValueError):
        return None
    if not record.key:
        return None
    return Item(
        sequence=record.sequence,
        key=record.key,
        tenant=headers.tenant,
        topic=record.partition.topic,
        block=_block(record, headers),
    )


def _block(record: Record, headers: Headers) -> bytes:
    """A CloudEvent in structured form; the payload is JSON already and goes in as it is."""
    envelope = {
        "specversion": "1.0",
        "id": str(record.sequence),
        "source": headers.source,
        "type": record.type,
        "subject": record.key,
        "time": record.time.isoformat(),
        "sequence": str(record.sequence),
        "tenant": headers.tenant,
        "dataschema": f"urn:tidewright:schema:{record.type}",
        **({} if headers.traceparent is None else {"traceparent": headers.traceparent}),
    }
    head = json.dumps(envelope, separators=(",", ":")).encode()[:-1]
    payload = b" ".join(record.payload.split(b"\n"))
    return b'id: %s\nevent: %s\ndata: %s,"data":%s}\n\n' % (
        str(record.sequence).encode(),
        record.type.encode(),
        head,
        payload,
    )


def gap_block(asked: LogSequence, resumed_after: LogSequence, detail: str) -> bytes:
    data = GapView(asked=str(asked), resumed_after=str(resumed_after), detail=detail)
    return f"id: {resumed_after}\nevent: gap\ndata: {data.model_dump_json()}\n\n".encode()
