"""The Kafka carrier: reads topics that the relay fills, from positions that lie in Postgres with the state.

There are no consumer groups: partitions are assigned by the caller, who holds their leases. A reader that seeks
looks first whether the record at its offset is the one that it knows; a topic that was made anew is read from its
beginning, and what is not above the position's sequence is dropped.
"""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from schemas.envelope import Sequence as LogSequence
from schemas.vocabulary import Topic
from shared.bus.brokers import Brokers
from shared.bus.cloudevents import to_record
from shared.bus.log import BEGINNING, Backlog, Page, Partition, Position, Record
from shared.bus.partitions import partitions_of
from shared.bus.topics import MESSAGE_BYTES_MAX, told
from shared.errors import Unavailable
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

_START_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 3.0
_STUCK_SECONDS: Final = 10.0
"""A consumer that gets nothing for so long although there is something is replaced."""
_FETCH_RECORDS_MAX: Final = 5_000
_log = get_logger(part="kafka")


@dataclass(slots=True)
class _Stand:
    """Where the fetcher stands in one partition, and what it has fetched beyond what was read."""

    position: Position
    """As the caller knows it: what was read last, or what it asked for."""
    expected: Position | None = None
    """Sought, and not yet seen: the first record that comes must be this one."""
    fetched: deque[tuple[int, Record | None]] = field(default_factory=deque)
    """(offset, record); None: nothing to us, but behind it is where we stand."""
    highest: LogSequence = BEGINNING.sequence
    """Of all that was fetched: what is not above it is a repeat."""


class KafkaLog:
    """Implements ``shared.bus.log.Log``. One reader's; only one task may call ``read`` and ``wait``.

    ``group``: under which name offsets are told to Kafka, for monitors alone. ``load_log_id``: which log's events are
    ours; those of another (a database that was restored, a stranger) are skipped. ``numbers``: the partitions that
    are read; None: all.
    """

    def __init__(
        self,
        brokers: Brokers,
        *,
        group: str,
        load_log_id: Callable[[], Awaitable[str]],
        instruments: Instruments,
        numbers: frozenset[int] | None = None,
    ) -> None:
        self._brokers = brokers
        self._group = f"{brokers.prefix}{group}"
        self._load_log_id = load_log_id
        self._numbers = numbers
        self._consumer: AIOKafkaConsumer | None = None
        self._source_end = b""
        self._stands: dict[Partition, _Stand] = {}
        self._saved: Mapping[Partition, Position] = {}
        self._count = 0
        self._well_at = time.monotonic()
        """When the client last got something, or had all that there was."""
        self._even_at = datetime.now(UTC)
        self._doomed: str | None = None
        """Why the client is to be replaced at the next read."""
        self._trouble: str | None = "Kafka has not answered yet"
        self._restarts = instruments.counter(
            "kafka_consumer_restarts_total", "Consumers that were replaced, by cause.", ("cause",)
        )
        self._skipped = instruments.counter("skipped_records_total", "Records that are nothing to us.", ("cause",))

    @property
    def trouble(self) -> str | None:
        return self._trouble

    def partitions(self, topics: Iterable[Topic]) -> tuple[Partition, ...]:
        return tuple(
            Partition(topic, number)
            for topic in sorted(topics)
            for number in range(partitions_of(topic))
            if self._numbers is None or number in self._numbers
        )

    def count(self, topic: Topic) -> int:
        return partitions_of(topic)

    # -- reading ----------------------------------------------------------------------------------------------

    async def read(self, positions: Mapping[Partition, Position], *, limit: int) -> Page:
        """What has been fetched, merged in the order of the log; never waits for more than the start of a client."""
        if not positions:
            return Page(records=(), positions={})
        await self._stand_at(positions)
        await self._fetch(seconds=0.0)
        records = list(self._take(limit))
        return Page(records=tuple(records), positions={p: self._stands[p].position for p in positions})

    async def wait(self, *, seen: int, seconds: float) -> int:
        if seconds > 0 and seen == self._count:
            if any(stand.fetched for stand in self._stands.values()):
                self._count += 1
            elif self._consumer is None:
                await asyncio.sleep(seconds)
            else:
                await self._fetch(seconds=seconds)
        return self._count

    def _take(self, limit: int) -> Iterator[Record]:
        """At most ``limit`` records: by sequence over all partitions, in their own order within each."""
        heads = [(_order_of(stand), partition) for partition, stand in self._stands.items() if stand.fetched]
        heapq.heapify(heads)
        taken = 0
        while heads and taken < limit:
            _, partition = heapq.heappop(heads)
            stand = self._stands[partition]
            offset, record = stand.fetched.popleft()
            sequence = stand.position.sequence if record is None or record.is_stray else record.sequence
            stand.position = Position(sequence, offset)
            if record is not None:
                taken += 1
                yield record
            if stand.fetched:
                heapq.heappush(heads, (_order_of(stand), partition))

    async def _fetch(self, *, seconds: float) -> None:
        """What the client has, or gets within so long, behind what was fetched before. Raises Unavailable."""
        consumer = self._consumer
        if consumer is None or sum(len(stand.fetched) for stand in self._stands.values()) >= _FETCH_RECORDS_MAX:
            return
        try:
            found = await consumer.getmany(timeout_ms=int(seconds * 1000), max_records=_FETCH_RECORDS_MAX)
        except (KafkaError, OSError) as exc:
            await self._drop("error")
            raise self._away(exc) from exc
        for part, messages in found.items():
            partition = Partition(self._brokers.topic_of(part.topic), part.partition)
            await self._keep(consumer, part, partition, messages)
        if found:
            self._count += 1
            self._well_at = time.monotonic()

    async def _keep(
        self, consumer: AIOKafkaConsumer, part: TopicPartition, partition: Partition, messages: list[ConsumerRecord]
    ) -> None:
        stand = self._stands.get(partition)
        if stand is None or not messages:
            return
        expected, stand.expected = stand.expected, None
        if expected is not None and messages[0].offset == expected.offset:
            first = self._to_record(partition, messages[0])
            if first is not None and not first.is_stray and first.sequence != expected.sequence:
                _log.warning("topic_made_anew", topic=part.topic, partition=part.partition, offset=expected.offset)
                self._restarts.labels("topic_made_anew").inc()
                await consumer.seek_to_beginning(part)
                return
            messages = messages[1:]
        for message in messages:
            record = self._to_record(partition, message)
            if record is not None and not record.is_stray:
                if record.sequence <= stand.highest:
                    self._skipped.labels("repeated").inc()
                    record = None
                else:
                    stand.highest = record.sequence
            stand.fetched.append((message.offset, record))

    def _to_record(self, partition: Partition, message: ConsumerRecord) -> Record | None:
        source = next((value for name, value in message.headers if name == "ce_source"), b"")
        if source and not source.endswith(self._source_end):
            self._skipped.labels("other_log").inc()
            return None
        return to_record(
            topic=partition.topic,
            partition=partition.number,
            offset=message.offset,
            key=message.key,
            value=message.value,
            headers=message.headers,
            time_ms=message.timestamp,
        )

    # -- the client -------------------------------------------------------------------------------------------

    async def _stand_at(self, positions: Mapping[Partition, Position]) -> None:
        """Have a client that is assigned these partitions and stands at these positions. Raises Unavailable."""
        if self._doomed is not None:
            await self._drop(self._doomed)
        consumer = self._consumer or await self._start()
        if self._stands.keys() != positions.keys():
            self._stands = {}
            consumer.assign([self._part(partition) for partition in sorted(positions)])
        for partition, position in positions.items():
            stand = self._stands.get(partition)
            if stand is None or stand.position != position:
                self._stands[partition] = _Stand(
                    position=position,
                    expected=position if position.offset is not None else None,
                    highest=position.sequence,
                )
                consumer.seek(self._part(partition), position.offset or 0)

    async def _start(self) -> AIOKafkaConsumer:
        if not self._source_end:
            self._source_end = f"/{await self._load_log_id()}".encode()
        consumer = AIOKafkaConsumer(
            **self._brokers.options(),
            group_id=self._group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",  # retention has removed what we stood at
            fetch_max_wait_ms=250,  # what is asked meanwhile waits for it
            max_partition_fetch_bytes=MESSAGE_BYTES_MAX,
            request_timeout_ms=int(_START_SECONDS * 1000),
            metadata_max_age_ms=60_000,
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await consumer.start()
        except (KafkaError, OSError, TimeoutError) as exc:
            await _close(consumer)
            raise self._away(exc) from exc
        self._consumer, self._stands, self._trouble = consumer, {}, None
        self._well_at = time.monotonic()
        return consumer

    async def _drop(self, cause: str) -> None:
        consumer, self._consumer, self._doomed = self._consumer, None, None
        self._stands = {}
        if consumer is not None:
            self._restarts.labels(cause).inc()
            await _close(consumer)

    async def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        self._stands = {}
        if consumer is not None:
            await _close(consumer)

    def _away(self, exc: BaseException) -> Unavailable:
        self._trouble = f"Kafka ({self._brokers.servers}) does not answer: {told(exc)}"
        return Unavailable(self._trouble)

    def _part(self, partition: Partition) -> TopicPartition:
        return TopicPartition(self._brokers.name_of(partition.topic), partition.number)

    # -- looking after it -------------------------------------------------------------------------------------

    def committed(self, positions: Mapping[Partition, Position]) -> None:
        self._saved = positions

    async def backlog(self, positions: Mapping[Partition, Position], *, limit: int) -> Backlog:
        """Also the watchdog: asks how far the topics go, and drops a client that stands still before more.

        Runs beside ``read``. Tells Kafka the saved offsets, as far as it takes them. Raises Unavailable also while
        there is no client: unknown is not zero.
        """
        if not positions:
            return Backlog(rows=0, oldest=None)
        consumer = self._consumer
        if consumer is None:
            raise Unavailable(self._trouble or "there is no client of Kafka at present")
        parts = [self._part(partition) for partition in self._stands]
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                ends = await consumer.end_offsets(parts)
                unfetched = sum([max(0, ends[part] - await consumer.position(part)) for part in parts])
        except (KafkaError, OSError, TimeoutError) as exc:
            if self._is_still():
                self._doomed = "no_answer"
            raise self._away(exc) from exc
        self._trouble = None
        if not unfetched:
            self._well_at = time.monotonic()
        elif self._is_still():
            _log.warning("consumer_stuck", records=unfetched)
            self._doomed = "stuck"
        await self._tell_offsets(consumer)
        rows = unfetched + sum(len(stand.fetched) for stand in self._stands.values())
        if rows == 0:
            self._even_at = datetime.now(UTC)
        return Backlog(rows=min(rows, limit), oldest=self._even_at if rows else None)

    def _is_still(self) -> bool:
        waits = any(stand.fetched for stand in self._stands.values())
        return not waits and time.monotonic() - self._well_at > _STUCK_SECONDS

    async def _tell_offsets(self, consumer: AIOKafkaConsumer) -> None:
        saved, self._saved = self._saved, {}
        offsets = {
            self._part(partition): position.offset + 1
            for partition, position in saved.items()
            if position.offset is not None
        }
        if offsets:
            with suppress(KafkaError, OSError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await consumer.commit(offsets)


def _order_of(stand: _Stand) -> tuple[LogSequence, int]:
    """Merge key of the next record: strays and what is skipped go with the record before them."""
    offset, record = stand.fetched[0]
    sequence = stand.position.sequence if record is None or record.is_stray else record.sequence
    return sequence, offset


async def _close(consumer: Any) -> None:
    with suppress(KafkaError, OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await consumer.stop()
