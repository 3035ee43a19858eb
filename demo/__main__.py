"""``python -m demo``: play the story, take everything down, check what happened, draw it."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from demo.claims import FIRST
from demo.faults import FAILS, Fault
from demo.installation import ROOT, CommandFailed, Installation, free_port, fresh_state, tail
from demo.journal import Journal
from demo.picture import Picture
from demo.record import BrokenRecord, read_record
from demo.screen import make_screen
from demo.story import Decided, DidNotHappen, Story, latest_log
from demo.summary import print_pauses

SLOTS: Final = 4
WINDOW_SECONDS: Final = 4.0
COOLDOWN_SECONDS: Final = 2.0
SETTINGS: Final = {
    "scaling.window_seconds": WINDOW_SECONDS,
    "scaling.cooldown_seconds": COOLDOWN_SECONDS,
    "metrics.emit_seconds": 1.0,
}
BAND: Final = {"target": 0.80, "band_low": 0.75, "band_high": 0.85}
"""As in production; the demo does not set them, it says them and the checker holds the run to them."""


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 the story went as told and every claim held, 1 not, 130 interrupted."""
    options = parse(arguments)
    fault = Fault(options.fault) if options.fault else None
    console = Console()
    record = options.out.absolute() / "record"
    shutil.rmtree(record, ignore_errors=True)
    installation = Installation(record=record, slots=SLOTS, settings=SETTINGS, state=fresh_state(), port=free_port())
    journal = Journal(record)
    journal.mark("settings", slots=SLOTS, window_seconds=WINDOW_SECONDS, cooldown_seconds=COOLDOWN_SECONDS, **BAND)
    introduce(console, fault)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    interrupted = play(installation, journal, console, fault)
    if interrupted:
        console.print("Interrupted: nothing of the demo runs any more.")
        installation.remove_state()
        return 130
    whole = check(console, record)
    finish(console, record, options.out / "timeline.png", fault)
    if whole or fault is not None:
        installation.remove_state()
    else:
        console.print(f"The state folder is kept for a look: {installation.state}")
    return 0 if whole else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description="One job through five services to elastic training.")
    parser.add_argument(
        "--fault",
        choices=["", *(str(f) for f in Fault)],
        default=os.environ.get("DEMO_FAULT", ""),
        help="spoil the run from outside; the claim that speaks of it must then fail (default: $DEMO_FAULT)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="folder for the record and the picture")
    return parser.parse_args(arguments)


def introduce(console: Console, fault: Fault | None) -> None:
    console.print(
        f"Scaling as in production (target 80 %, band 75..85 %); only shortened: window 300 → {WINDOW_SECONDS:g} s,"
        f" cooldown 300 → {COOLDOWN_SECONDS:g} s, measured in slices of 1 s instead of 5.",
        highlight=False,
    )
    if fault is not None:
        console.print(f"FAULT {fault}: this run must fail, and by the claim {FAILS[fault]!r} alone.", highlight=False)


def play(installation: Installation, journal: Journal, console: Console, fault: Fault | None) -> bool:
    """Play the story and take everything down, whatever happens. True if somebody interrupted it."""
    began = time.time()
    picture = Picture(slots=SLOTS)
    trouble, interrupted = "", False
    with make_screen(console, began=began) as screen:
        story = Story(installation, journal=journal, screen=screen, picture=picture, fault=fault)
        try:
            story.play()
        except Decided:
            journal.mark("cut", why="what the fault should show is decided")
        except (DidNotHappen, CommandFailed) as exc:
            trouble = str(exc)
            journal.mark("cut", why=trouble)
        except KeyboardInterrupt:
            interrupted = True
            journal.mark("cut", why="interrupted")
        finally:
            forced = take_down(story, installation)
            journal.mark("down")
            picture.now = f"everything is taken down, {time.time() - began:.0f} s after the start"
            picture.say(time.time(), f"== {picture.now}")
            screen.show(picture)
    if trouble:
        explain(console, installation, trouble)
    for command in forced:
        console.print(f"had to be killed by force: {command}", style="red", highlight=False)
    return interrupted


def take_down(story: Story, installation: Installation) -> list[str]:
    """Deaf to further signals: half a teardown would leave something running."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    story.clean_up()
    return installation.stop()


def explain(console: Console, installation: Installation, trouble: str) -> None:
    """What did not happen, and the last words of those who may know why."""
    console.print(f"\nDid not happen: {trouble}", style="bold red", highlight=False)
    record = installation.record
    logs = [record / "up.log", record / "down.log", *sorted((installation.state / "log").glob("*.log"))]
    journal_jobs = sorted((record / "run").glob("*"))
    logs += [log for job in journal_jobs if (log := latest_log(record, job.name)) is not None]
    for log in logs:
        lines = tail(log, 12)
        if lines:
            console.print(f"-- the end of {log}", style="dim", highlight=False)
            for line in lines:
                console.print(f"   {line[:300]}", highlight=False, markup=False, soft_wrap=True)


def check(console: Console, record: Path) -> bool:
    """Run the checker as the program of its own that it is; True if every claim held."""
    console.print("\nChecked from ledgers, /proc and the event stream (python -m demo.checker):", soft_wrap=True)
    done = subprocess.run(
        [sys.executable, "-m", "demo.checker", str(record)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    for line in (done.stdout + done.stderr).splitlines():
        style = {"ok": "green", "FAILED": "bold red"}.get(line.split()[0] if line.split() else "", "yellow")
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
    return done.returncode == 0


def finish(console: Console, record: Path, picture: Path, fault: Fault | None) -> None:
    """Pauses, the picture, and where both lie."""
    try:
        what = read_record(record)
    except BrokenRecord as exc:
        console.print(f"No summary: {exc}", highlight=False)
        return
    console.print()
    print_pauses(console, what)
    if what.job(FIRST) is None:
        return
    subprocess.run([sys.executable, "-m", "demo.timeline", str(record), str(picture)], cwd=ROOT, check=True)
    console.print(f"\nTimeline: {picture}\nRecord:   {record}", highlight=False, soft_wrap=True)
    if fault is not None:
        console.print(f"This run was spoilt on purpose ({fault}): {FAILS[fault]!r} should be the one FAILED claim.")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
