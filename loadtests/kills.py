"""Kills everything, again and again, while jobs come and go: ``python -m loadtests.kills``.

A real ``tide up`` on 4 slots. Users submit, scale, urge and cancel; SIGKILL goes to one thing at a time at a random
moment: the services' process, the Postgres postmaster, the zygote, a shim, a worker, or everything but the trainers.
What happened is recorded from outside and judged by ``loadtests.kills_checker``.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from demo.installation import Installation, free_port, fresh_state, tail
from demo.journal import Journal
from demo.record import read_record
from loadtests.installation import START_SECONDS, until
from loadtests.kills_checker import Findings, find, told
from loadtests.kills_crowd import Crowd
from loadtests.kills_storm import NotBack, Storm, make_folder, plan_victims

SLOTS: Final = 4
KILLS: Final = 50
KILLS_QUICK: Final = 8
SETTINGS: Final = {
    "scaling.window_seconds": 3.0,
    "scaling.cooldown_seconds": 1.0,
    "metrics.emit_seconds": 1.0,
    "queueing.back_off_first_seconds": 0.3,
    "queueing.back_off_limit_seconds": 1.0,
}
"""Shortened so that the policy grows a job within the run, and so that its bad luck is soon forgotten."""


def main(arguments: list[str]) -> int:
    """Exit status: 0 nothing is wrong, 1 something is, 130 interrupted."""
    options = parse(arguments)
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    kills = options.kills or (KILLS_QUICK if options.quick else KILLS)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    say(f"{kills} kills, seed {options.seed}, {SLOTS} slots, {machine}")
    state = fresh_state()
    record = (options.out or state.with_name(f"{state.name}-record")).absolute()
    shutil.rmtree(record, ignore_errors=True)
    installation = Installation(record=record, slots=SLOTS, settings=SETTINGS, state=state, port=free_port())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    interrupted, forced = play(installation, random.Random(options.seed), kills, say)
    if interrupted:
        return 130
    findings = find(read_record(record))
    seconds = time.monotonic() - began
    say(f"{findings.jobs} jobs, {findings.steps} steps, {findings.repeated} done again, {seconds:.0f} s")
    console.print(table(findings, record))
    for line in [*told(findings), *(f"had to be killed by force: {command}" for command in forced)]:
        say(line)
    if options.json:
        settings = {"seed": options.seed, "slots": SLOTS, "cores": os.cpu_count(), **SETTINGS}
        text = json.dumps({"results": findings.results, "settings": settings}, indent=1)
        options.json.write_text(f"{text}\n")
    if not findings.is_good:
        say(f"The record is kept: {record}; the state folder: {state}")
        return 1
    installation.remove_state()
    if options.out is None:
        shutil.rmtree(record, ignore_errors=True)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, help=f"default: {KILLS}, with --quick {KILLS_QUICK}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000), help="default: any")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the record there")
    return parser.parse_args(arguments)


def play(
    installation: Installation, rng: random.Random, kills: int, say: Callable[[str], None]
) -> tuple[bool, list[str]]:
    """Run it and take everything down, whatever happens: (somebody interrupted it, what needed force to end)."""
    journal = Journal(installation.record)
    work = make_folder(installation.state)
    crowd = Crowd(installation=installation, journal=journal, rng=random.Random(rng.random()), work=work, say=say)
    storm = Storm(installation=installation, journal=journal, crowd=crowd, rng=rng, say=say)
    victims = plan_victims(rng, kills)
    interrupted = False
    try:
        installation.start()
        until("it is ready", installation.ready, seconds=START_SECONDS, trouble=installation.ended)
        storm.blow(victims)
    except NotBack as exc:
        journal.mark("given_up", why=str(exc))
        say(f"given up: {exc}")
        for log in (installation.record / "up.log", *sorted((installation.state / "log").glob("*.log"))):
            say("\n   ".join([f"-- the end of {log}", *tail(log, 8)]))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        forced = installation.stop()
        journal.mark("down")
        shutil.rmtree(work, ignore_errors=True)
    say(", ".join(f"{what} {count}" for what, count in sorted(crowd.done.items())))
    return interrupted, forced


def table(findings: Findings, record: Path) -> Table:
    marks = read_record(record).marks
    shown = Table(
        title="What was killed, and what came back after how long (seconds)", title_justify="left", box=None
    )
    for heading in ("killed", "times", "answers: median", "most", "whole: median", "most", "longest step gap"):
        shown.add_column(heading, justify="left" if heading == "killed" else "right")
    for victim in sorted({o.victim for o in findings.outages}):
        outages = [o for o in findings.outages if o.victim == victim]
        numbers = {o.number for o in outages}
        back, whole = (
            [float(m.data["seconds"]) for m in marks if m.name == name and m.data["number"] in numbers]
            for name in ("back", "whole")
        )
        shown.add_row(
            victim,
            str(len(outages)),
            *(f"{value:.2f}" for values in (back, whole) for value in (statistics.median(values), max(values))),
            f"{max(o.gap_seconds for o in outages):.2f}",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
