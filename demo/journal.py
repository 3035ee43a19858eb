"""What the demo writes down of its own deeds, and how it follows the recorded event stream."""

import json
import time
from pathlib import Path
from typing import Any

from demo.record import EVENTS, MARKS, Event, to_event


class Journal:
    """Marks go to the record at once; events are read from it as the recorder writes them."""

    def __init__(self, record: Path) -> None:
        record.mkdir(parents=True, exist_ok=True)
        self._marks = record / MARKS
        self._events = record / EVENTS
        self._offset = 0

    def mark(self, name: str, *, at: float | None = None, **data: Any) -> None:
        """Write down what the demo does, before it does it (``at``: wall time in seconds, default now)."""
        line = {"mark": name, "t": time.time() if at is None else at, **data}
        with self._marks.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def new_events(self) -> list[Event]:
        """Events that came in since the last call, in the order of the stream."""
        try:
            with self._events.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [to_event(json.loads(line)) for line in whole.splitlines()]
