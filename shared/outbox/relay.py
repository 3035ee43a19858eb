"""The relay: pumps the outbox into Kafka, in commit order, from a position that it saves behind itself.

One process of the installation holds its lease. It sends, waits for the acknowledgements, then moves its position;
after any failure it begins again where its position stands. So each relay writes an unbroken run of the log, and
what is sent again carries the same sequence: readers drop it.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from schemas.vocabulary import Topic
from shared.bus import quarantine
from shared.bus.log import Log, Partition, Position
from shared.bus.positions import advance_positions, load_positions, rewind_position
from shared.bus.quarantine import Cause, SetAside
from shared.clock import Clock, pause
from shared.errors import Conflict, LeaseLost, Poison, Unavailable
from shared.outbox.sender import Sender
from shared.runtime.backoff import backoff_seconds
from shared.runtime.lease import PostgresLease
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

READER: Final = "relay"
_ROUND_MAX: Final = 2_000
_POLL_SECONDS_MAX: Final = 0.25
_IDLE_SAVE_SECONDS: Final = 60.0
_UPKEEP_SECONDS: Final = 5.0
_LAG_ROWS_MAX: Final = 10_000
_BACKOFF_SECONDS_MAX: Final = 2.0
_log = get_logger(part="relay")


async def send_again(engine: AsyncEngine, topics: Sequence[Topic]) -> None:
    """Topics are about to be made: what a topic of the same name held and not everybody has read is lost with it.

    The relay begins again behind what all have read; the outbox still has it, and who has read more drops repeats.
    Raises Unavailable.
    """
    if await rewind_position(engine, READER, topics):
        _log.warning(
            "topics_missing", topics=[topic.value for topic in topics], detail="what is unread is sent again"
        )


class Relay:
    """One candidate. ``run`` from start to stop of a process; it works while it holds the lease."""

    def __init__(
        self,
        *,
        log: Log,
        sender: Sender,
        lease: PostgresLease,
        clock: Clock,
        instruments: Instruments,
    ) -> None:
        self._log = log
        self._sender = sender
        self._lease = lease
        self._clock = clock
        self._partitions = log.partitions(Topic)
        self._stored: dict[Partition, Position] = {}
        self._looked: dict[Partition, Position] = {}
        self._parked: frozenset[str] = frozenset()
        self._round = _ROUND_MAX
        self._saved_at = 0.0
        self._upkeep_at = -_UPKEEP_SECONDS
        self.trouble: str | None = None
        """Why nothing goes out at present, for people."""
        self._sent = instruments.counter("relayed_events_total", "Events acknowledged by Kafka.", ("topic",))
        self._seconds = instruments.histogram("relay_round_seconds", "One round: read, sent, position saved.")
        self._failures = instruments.counter("relay_failures_total", "Rounds that failed.", ("kind",))
        self._held = instruments.gauge("relay_held_info", "1 while this process relays the outbox to Kafka.")
        self._lag = instruments.gauge("relay_lag_events", "Rows of the outbox not yet in Kafka (at most 10000).")
        self._oldest = instruments.gauge(
            "relay_oldest_unsent_seconds", "Age of the oldest row of the outbox that is not in Kafka; 0 if none."
        )
        self._aside = instruments.counter("relay_set_aside_total", "Events that Kafka does not take.", ("cause",))

    async def run(self, stopping: asyncio.Event) -> None:
        """Until ``stopping``: take the lease, relay while it is held, and begin again when it is lost."""
        while not stopping.is_set():
            if not await self._lease.acquire(stopping, url=None):
                return
            self._held.set(1)
            try:
                await self._hold(stopping)
            except* LeaseLost as lost:
                _log.warning("relay_lease_lost", detail=str(lost.exceptions[0]))
            finally:
                for gauge in (self._held, self._lag, self._oldest):
                    gauge.set(0)
                await self._sender.close()
                await self._lease.release()

    async def drain(self) -> int:
        """Relay what is there now, and give the lease back; gives the number of rounds. For tests and tools."""
        assert await self._lease.try_acquire(url=None), "another process relays"
        try:
            await self._load()
            rounds = 0
            while await self.step():
                rounds += 1
            return rounds
        finally:
            await self._lease.release()

    async def close(self) -> None:
        await self._sender.close()

    async def _hold(self, stopping: asyncio.Event) -> None:
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lease.run_renewal(ended))
            lag = group.create_task(self._run_lag(ended))
            try:
                await self._pump(stopping)
            finally:
                ended.set()
                lag.cancel()

    async def _pump(self, stopping: asyncio.Event) -> None:
        """Rounds, until told to stop and nothing is left; raises LeaseLost."""
        failures, is_loaded, seen = 0, False, -1
        while True:
            try:
                if not is_loaded:
                    await self._load()
                    is_loaded = True
                seen = await self._log.wait(seen=-1, seconds=0) if seen < 0 else seen
                worked = await self.step()
                failures, self.trouble = 0, None
            except (Unavailable, Conflict) as exc:
                failures, is_loaded = failures + 1, False
                self._note(exc, failures)
                await pause(stopping, backoff_seconds(failures, maximum=_BACKOFF_SECONDS_MAX))
                if stopping.is_set():
                    return
                continue
            if not worked:
                if stopping.is_set():
                    return
                seen = await self._log.wait(seen=seen, seconds=_POLL_SECONDS_MAX)

    async def step(self) -> bool:
        """One round; False if there was nothing to send. Raises Unavailable, Conflict or LeaseLost."""
        began = self._clock.monotonic()
        await self._upkeep()
        page = await self._log.read(self._looked, limit=self._round)
        if not page.records:
            self._looked = dict(page.positions)
            if began - self._saved_at > _IDLE_SAVE_SECONDS:
                await self._save(page.positions, ())
            return False
        aside = [
            SetAside(record=record, cause=Cause.PARKED, reason="follows an earlier record of its key")
            for record in page.records
            if record.parks_its_key and record.key in self._parked
        ]
        held_back = {item.record.sequence for item in aside}
        sent = [record for record in page.records if record.sequence not in held_back]
        try:
            await self._sender.send(sent)
        except Poison as exc:
            if len(sent) > 1:  # ever smaller rounds find the one
                self._round = max(1, len(page.records) // 2)
                return True
            aside.append(SetAside(record=sent[0], cause=Cause.FAILED, reason=str(exc)))
            sent = []
        await self._save(page.positions, aside)
        self._round = min(_ROUND_MAX, self._round * 2)
        for record in sent:
            self._sent.labels(record.partition.topic.value).inc()
        self._seconds.observe(self._clock.monotonic() - began)
        return True

    # -- what it remembers ------------------------------------------------------------------------------------

    async def _load(self) -> None:
        async with self._lease.transaction() as tx:
            self._stored = await load_positions(tx, READER, self._partitions, counts=dict.fromkeys(Topic, 1))
            self._parked = await quarantine.load_parked(tx, READER)
        self._looked = dict(self._stored)
        self._saved_at = self._clock.monotonic()

    async def _save(self, positions: Mapping[Partition, Position], aside: Sequence[SetAside]) -> None:
        async with self._lease.transaction() as tx:
            await advance_positions(tx, READER, stored=self._stored, reached=positions)
            await quarantine.set_aside(tx, READER, aside, now=self._clock.now())
        self._stored = dict(positions)
        self._looked = dict(positions)
        self._parked |= {item.record.key for item in aside if item.parks_key and item.record.key}
        self._saved_at = self._clock.monotonic()
        for item in aside:
            self._aside.labels(item.cause.value).inc()
            _log.error(
                "record_quarantined",
                reader=READER,
                type=item.record.type,
                key=item.record.key,
                sequence=str(item.record.sequence),
                cause=item.cause.value,
                reason=item.reason,
            )

    async def _upkeep(self) -> None:
        """Every few seconds: send what is to be retried, learn which keys were dropped."""
        now = self._clock.monotonic()
        if now - self._upkeep_at < _UPKEEP_SECONDS:
            return
        self._upkeep_at = now
        async with self._lease.transaction() as tx:
            marked = await quarantine.load_marked(tx, READER)
            self._parked = await quarantine.load_parked(tx, READER)
        if marked:
            async with self._lease.transaction() as tx:
                await quarantine.publish_again(tx, READER, marked)
                self._parked = await quarantine.load_parked(tx, READER)
            _log.info("key_retried", reader=READER, key=marked[0].key, records=len(marked))
            self._upkeep_at = -_UPKEEP_SECONDS

    # -- telling ----------------------------------------------------------------------------------------------

    def _note(self, exc: Exception, failures: int) -> None:
        self.trouble = str(exc)
        self._failures.labels(type(exc).__name__).inc()
        level = logging.WARNING if failures == 1 else logging.DEBUG
        _log.log(level, "relay_round_failed", detail=str(exc), failures=failures)

    async def _run_lag(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            try:
                backlog = await self._log.backlog(self._stored, limit=_LAG_ROWS_MAX)
            except Unavailable:
                backlog = None
            if backlog is not None:
                age = (self._clock.now() - backlog.oldest).total_seconds() if backlog.oldest else 0.0
                self._lag.set(backlog.rows)
                self._oldest.set(max(0.0, age))
            await pause(ended, _UPKEEP_SECONDS)
