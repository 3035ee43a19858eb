"""What the main thread's trainer works with, and what others wish of it."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tidewright import protocol
from tidewright.elastic.keeper import Keeper
from tidewright.elastic.ledger import Ledger
from tidewright.elastic.offers import Offers
from tidewright.elastic.standing import Standing
from tidewright.elastic.tracked import Tracked


@dataclass(slots=True)
class Wishes:
    """What others ask of this member; set by the connection or a signal, read at boundaries."""

    stop_reason: str | None = None

    @property
    def stop(self) -> bool:
        return self.stop_reason is not None


@dataclass(slots=True)
class Parts:
    """What a trainer works with."""

    standing: Standing
    offers: Offers
    tracked: Tracked
    ledger: Ledger
    wishes: Wishes
    changed: threading.Condition
    say: Callable[[protocol.Message], None]
    flush: Callable[[], None]
    keeper: Keeper
    plan: Mapping[str, Any]
