"""What intake does with events: fold them into the read model, and say when a job is over."""

from collections.abc import Sequence
from datetime import datetime

from schemas.envelope import Draft, Event
from schemas.registry import EventData
from services.intake.core.readmodel import fold_batch, jobs_of
from services.intake.projection import load_registers, save_folded
from services.intake.store import delete_environments
from shared.runtime.service import Transaction


class Projection:
    """The read model lies in Postgres alone: nothing is kept in memory."""

    async def load(self, tx: Transaction) -> None:
        """Nothing to load."""

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        known = await load_registers(tx, jobs_of(batch))
        folded = fold_batch(known, batch)
        await save_folded(tx, folded, now=now)
        if folded.endings:
            await delete_environments(tx, [ending.job_id for ending in folded.endings])
        tx.publish(*(Draft(key=ending.job_id, tenant=ending.tenant, data=ending.data) for ending in folded.endings))

    def on_committed(self) -> None:
        """Subscribers read the log, not this."""

    def due_seconds(self) -> float | None:
        return None
