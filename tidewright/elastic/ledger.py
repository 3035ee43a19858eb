"""The trainer's own record of what it did, one JSON object a line: the proof that every sample was used once."""

import json
import math
import os
import sys
import time
from contextlib import suppress
from typing import Any


def finite(value: float | None) -> float | None:
    """A number for JSON, which has no NaN: null."""
    return value if value is not None and math.isfinite(value) else None


class Ledger:
    """Appends whole lines with one write each (5 µs); a killed process loses none. A full disk stops no training.

    What counts of it, after falls back and deaths in the middle of a step, ``proof`` says.
    """

    def __init__(self, directory: str | None) -> None:
        self._descriptor = -1
        self._complained = False
        self._is_torn = False
        if directory:
            try:
                path = os.path.join(directory, "ledger.jsonl")  # noqa: PTH118
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            except OSError as error:
                self._complain(error)

    def write(self, kind: str, **fields: Any) -> None:
        if self._descriptor < 0:
            return
        line = json.dumps({"k": kind, **fields, "pid": os.getpid(), "t": time.time()}, separators=(",", ":"))
        data = (b"\n" if self._is_torn else b"") + line.encode() + b"\n"
        try:
            written = os.write(self._descriptor, data)
            self._is_torn = written < len(data)  # a disk that became full has taken a part of the line
        except OSError as error:
            self._complain(error)

    def sync(self) -> None:
        """Have what was written on the disk (4 ms); done with a checkpoint only."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.fdatasync(self._descriptor)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            sys.stderr.write(f"tidewright: the ledger cannot be written: {error}\n")
