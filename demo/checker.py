"""Checks a recorded run against the claims of the story: ``python -m demo.checker RECORD_FOLDER``.

It imports nothing of the product but the reader of ledgers, which shares nothing with what writes them, and talks
to none of it: what it knows is what the trainers wrote, what /proc showed and what the event stream said. Exit
status: 0 every claim held, 1 one failed or was never reached, 2 the record cannot be read.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from demo.claims import grew, outlived_outage, replaced, shrank_in_place, took_back, urgent_ran
from demo.laws import accurate, closed_once, epochs_rise, nothing_left, once, within_slots
from demo.record import BrokenRecord, Record, read_record
from demo.verdict import Status, Verdict

CLAIMS: Final[dict[str, tuple[str, Callable[[Record], Verdict]]]] = {
    "grew": ("grew 1 → 2 → 4 because it was busy for a full window", grew),
    "shrank-in-place": ("shrank 4 → 2 and kept its processes", shrank_in_place),
    "urgent-ran": ("the urgent job ran in the room and ended", urgent_ran),
    "took-back": ("took the room back", took_back),
    "replaced": ("the killed worker was replaced, the others stayed", replaced),
    "outlived-outage": ("trained on while the services were away", outlived_outage),
    "once": ("every step and every sample exactly once", once),
    "within-slots": ("never more held than there are slots", within_slots),
    "epochs-rise": ("epochs, attempts and generations only rise", epochs_rise),
    "closed-once": ("each job closed once", closed_once),
    "accurate": ("held-out accuracy of at least 95 %", accurate),
    "nothing-left": ("nothing of it runs any more", nothing_left),
}


def check(record: Record) -> dict[str, Verdict]:
    """Every claim's verdict, in the order of the story."""
    return {name: claim(record) for name, (_, claim) in CLAIMS.items()}


def told(name: str, verdict: Verdict) -> str:
    """One claim as one line."""
    return f"{verdict.status:<12}{name:<17}{CLAIMS[name][0]}: {verdict.detail}"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m demo.checker RECORD_FOLDER", file=sys.stderr)
        return 2
    try:
        record = read_record(Path(arguments[0]))
    except BrokenRecord as exc:
        print(f"the record cannot be read: {exc}", file=sys.stderr)
        return 2
    verdicts = check(record)
    for name, verdict in verdicts.items():
        print(told(name, verdict))
    return 0 if all(v.status is Status.OK for v in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
