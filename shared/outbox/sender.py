"""Sends records to Kafka: one idempotent producer, thrown away at the first doubt."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import InvalidTimestampError, KafkaError, MessageSizeTooLargeError, RecordListTooLargeError
from aiokafka.producer.message_accumulator import BatchBuilder

from shared.bus.brokers import Brokers
from shared.bus.cloudevents import to_message
from shared.bus.log import Record
from shared.bus.partitions import partition_of, partitions_of
from shared.bus.topics import MESSAGE_BYTES_MAX, told
from shared.errors import Poison, Unavailable

BATCH_BYTES_MAX: Final = 512 * 1024
_CLOSE_SECONDS: Final = 2.0
_REFUSED: Final = (MessageSizeTooLargeError, RecordListTooLargeError, InvalidTimestampError)
"""What no repetition changes."""


class Sender:
    """Sends in order and waits for every acknowledgement, never longer than ``seconds``.

    After any failure nobody knows what has arrived: the producer is dropped, and the caller sends again from where
    it knows. An idempotent producer may otherwise stay stuck for ever.
    """

    def __init__(self, brokers: Brokers, *, seconds: float) -> None:
        self._brokers = brokers
        self._seconds = seconds
        self._producer: AIOKafkaProducer | None = None

    async def send(self, records: Sequence[Record]) -> None:
        """Returns once all brokers that must have them have them all.

        Raises Unavailable, or Poison if one of the records is larger than its topic takes, or refused for good.
        Cost: about 25 µs a record.
        """
        try:
            async with asyncio.timeout(self._seconds):
                producer = self._producer or await self._start()
                sent = []
                for batch, name, number in self._batches(producer, records):
                    sent.append(await producer.send_batch(batch, name, partition=number))
                    sent[-1].add_done_callback(_noted)
                for acknowledged in sent:
                    await acknowledged
        except _REFUSED as exc:
            await self.close()
            raise Poison(f"Kafka does not take it: {told(exc)}") from exc
        except (KafkaError, OSError, TimeoutError) as exc:
            await self.close()
            raise Unavailable(f"Kafka ({self._brokers.servers}) does not take events: {told(exc)}") from exc

    async def close(self) -> None:
        """Let go of the producer within seconds, whatever state it is in; the next ``send`` makes a new one."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        with suppress(TimeoutError, KafkaError, OSError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await producer.stop()
                return
        # What it still wanted to send is given up: its own way to stop waits for that without end.
        with suppress(TimeoutError, KafkaError, OSError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await producer._sender.close()  # there is no public way
                await producer.client.close()

    async def _start(self) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            **self._brokers.options(),
            enable_idempotence=True,
            acks="all",
            linger_ms=0,
            max_batch_size=BATCH_BYTES_MAX,
            max_request_size=MESSAGE_BYTES_MAX + BATCH_BYTES_MAX,
            request_timeout_ms=max(1, int(self._seconds * 1000)),
            metadata_max_age_ms=60_000,
        )
        self._producer = producer
        await producer.start()
        return producer

    def _batches(self, producer: AIOKafkaProducer, records: Sequence[Record]) -> list[tuple[BatchBuilder, str, int]]:
        """Full batches of each partition, in log order."""
        open_batches: dict[tuple[str, int], BatchBuilder] = {}
        batches: list[tuple[BatchBuilder, str, int]] = []
        for record in records:
            topic = record.partition.topic
            place = (self._brokers.name_of(topic), partition_of(record.key or "", partitions_of(topic)))
            message = to_message(record)
            content = {"timestamp": None, **message._asdict()}
            if place not in open_batches or open_batches[place].append(**content) is None:
                batch = open_batches[place] = producer.create_batch()
                batches.append((batch, *place))
                batch.append(**content)
        return batches


def _noted(sent: "asyncio.Future[object]") -> None:
    """Whoever waits for the first failure does not wait for the rest."""
    if not sent.cancelled():
        sent.exception()
