"""The four ways to spoil the story from outside, each with the claim that must then fail."""

import signal
import subprocess
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

from demo.installation import ROOT, Installation, send
from demo.record import Process
from demo.recorder import MARKER_VARIABLE

STALL_SECONDS: Final = 3.0
"""How long ``stalled`` stops the workers: above the gap that the checker allows."""


class Fault(StrEnum):
    """What is done, and nothing in the product knows of it.

    - ``no-shrink``: the first job becomes critical and the second is submitted as low, so nothing shrinks for it.
    - ``lost-worker``: the zygote is stopped while the worker is killed, so nothing can be started in its place.
    - ``double-run``: a second trainer of the first job is started by hand into its run folder.
    - ``stalled``: the workers are stopped while the services are away.
    """

    NO_SHRINK = "no-shrink"
    LOST_WORKER = "lost-worker"
    DOUBLE_RUN = "double-run"
    STALLED = "stalled"


FAILS: Final = {
    Fault.NO_SHRINK: "shrank-in-place",
    Fault.LOST_WORKER: "replaced",
    Fault.DOUBLE_RUN: "once",
    Fault.STALLED: "outlived-outage",
}
"""The claim that each fault must fail, and no other."""


def zygote_of(installation: Installation) -> Process | None:
    return installation.process(lambda command: "tidewright.elastic.zygote" in command)


def signal_all(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        send(process, number)


def start_rogue(installation: Installation, *, job: str, script: Path) -> subprocess.Popen[bytes]:
    """Start a trainer that nobody asked for: it has no address to join, so it trains alone, from step 0."""
    folder = installation.state / "run" / job / "worker-9-1"
    folder.mkdir(parents=True)
    environment = {k: v for k, v in installation.environment.items() if not k.startswith("TIDE_")}
    environment |= {
        "TIDE_MEMBER_DIRECTORY": str(folder),
        "TIDE_MEMBER": f"{job}/worker/9/1",
        MARKER_VARIABLE: installation.marker,
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(script)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
