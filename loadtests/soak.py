"""Does anything grow? ``python -m loadtests.soak``: many short jobs through ``tide up``, then one job often resized.

500 jobs and 200 resizes (``--quick``: 40 and 20). The server's processes are looked at twice a second from outside;
the worker that stays through all resizes after each of them. Ends with 1 if something grew that must not.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from demo.installation import Installation
from loadtests.installation import client_of, installation
from loadtests.soak_jobs import JobLoad
from loadtests.soak_resizes import Growth, Look, ResizeLoad, growth_of
from loadtests.soak_watch import SERVER, Sample, ServerWatch, chart, windows

SLOTS: Final = 4
FLAT_RATIO_MAX: Final = 0.05
TRAINER_BYTES_MAX: Final = 32 * 1024
TRAINER_BYTES_MEAN_MAX: Final = 2 * TRAINER_BYTES_MAX
_MIB: Final = 1 << 20
_PROGRESS_SECONDS: Final = 10.0
_BURST: Final = 16
_REQUESTS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What one run has measured."""

    jobs: JobLoad
    resizes: ResizeLoad
    job_samples: Sequence[Sample]
    resize_samples: Sequence[Sample]
    shims_left: int
    seconds: float

    @property
    def growth(self) -> Growth:
        return growth_of(self.resizes.looks)

    def results(self) -> dict[str, list[float]]:
        """``[first, middle, last]`` each."""
        return {
            "server_memory_bytes": self._server(lambda one: one.server.memory_bytes),
            "server_descriptors": self._server(lambda one: one.server.descriptors),
            "trainer_memory_bytes": self._trainer(lambda one: one.usage.memory_bytes),
            "trainer_descriptors": self._trainer(lambda one: one.usage.descriptors),
        }

    def faults(self) -> list[str]:
        """What grew that must not."""
        growth, found = self.growth, []
        flat = {name: self.results()[name] for name in ("server_memory_bytes", "server_descriptors")}
        # The zygote is most of the sum and never changes: the services are judged alone, too.
        flat["memory of the services"] = self._server(lambda one: one.parts["process"].memory_bytes)
        for name, (_, middle, last) in flat.items():
            if last - middle > FLAT_RATIO_MAX * middle:
                found.append(f"{name} grew from {middle:.0f} to {last:.0f} in the second half")
        if growth.descriptors > 1.05 or growth.threads > 1.05:
            found.append("the trainer loses more than 1 descriptor and 1 thread per generation")
        if growth.settled and (
            growth.memory_bytes > TRAINER_BYTES_MAX or growth.memory_bytes_mean > TRAINER_BYTES_MEAN_MAX
        ):
            found.append("the trainer loses more than 32 KB per generation (mean: 64 KB)")
        if self.shims_left:
            found.append(f"{self.shims_left} children of the zygote are left")
        return found

    def _server(self, value: Callable[[Sample], int]) -> list[float]:
        return windows([(one.progress, value(one)) for one in self.job_samples], total=self.jobs.total)

    def _trainer(self, value: Callable[[Look], int]) -> list[float]:
        looks = self.resizes.looks
        return windows([(at, value(one)) for at, one in enumerate(looks)], total=len(looks) - 1)


def soak(*, jobs: int, resizes: int, at_once: int, say: Callable[[str], None] = print) -> Soak:
    """Run it on an installation of its own. Raises JobsWrong, ResizesWrong, Gone."""
    began = time.monotonic()
    with installation(slots=SLOTS) as found, client_of(found) as client:
        open_pools(found)
        job_load = JobLoad(client=client, total=jobs, at_once=at_once)
        job_samples = _watched(found, lambda: job_load.done, job_load.run, "jobs ended", say)
        resize_load = ResizeLoad(client=client, resizes=resizes)
        resize_samples = _watched(found, lambda: resize_load.done, resize_load.run, "resizes done", say)
        return Soak(
            jobs=job_load,
            resizes=resize_load,
            job_samples=job_samples,
            resize_samples=resize_samples,
            shims_left=_shims_left(found),
            seconds=time.monotonic() - began,
        )


def open_pools(found: Installation) -> None:
    """Let a burst of requests open what a busy server opens once: it is no growth."""

    def ask() -> None:
        with client_of(found) as client:
            for _ in range(_REQUESTS):
                list(client.jobs(limit=1))
                client.capacity()

    threads = [threading.Thread(target=ask) for _ in range(_BURST)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _watched(
    found: Installation,
    progress: Callable[[], int],
    run: Callable[..., None],
    what: str,
    say: Callable[[str], None],
) -> list[Sample]:
    watch = ServerWatch(found.state, progress=progress)
    next_word = time.monotonic()

    def on_progress() -> None:
        nonlocal next_word
        watch.check()
        if time.monotonic() >= next_word and watch.samples:
            next_word = time.monotonic() + _PROGRESS_SECONDS
            last = watch.samples[-1]
            say(
                f"{last.seconds:6.0f} s  {progress():4d} {what}  server {last.server.memory_bytes / _MIB:6.1f} MiB "
                f"{last.server.descriptors:4d} descriptors  {last.shims} shims"
            )

    watch.start()
    try:
        run(on_progress=on_progress)
    finally:
        watch.stop()
    watch.check()
    return [*watch.samples, watch.sample()]


def _shims_left(found: Installation, *, seconds: float = 10.0) -> int:
    """Once all jobs are over, after the moment that a shim takes to end."""
    watch = ServerWatch(found.state, progress=lambda: 0)
    deadline = time.monotonic() + seconds
    while (left := watch.sample().shims) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


# -- what is told ---------------------------------------------------------------------------------------------


def show(done: Soak) -> None:
    growth = done.growth
    ends = ", ".join(f"{number} {name}" for name, number in sorted(done.jobs.ended.items()))
    print(f"\n{done.jobs.done} jobs ended as they had to: {ends}; the longest took {done.jobs.longest_seconds:.1f} s")
    print(
        f"{done.resizes.done} resizes through {growth.generations} generations, "
        f"{sorted(done.resizes.seconds)[len(done.resizes.seconds) // 2]:.2f} s each (median)\n"
    )
    print(f"{'':28}{'first':>12}{'middle':>12}{'last':>12}  last - middle")
    for name, (first, middle, last) in done.results().items():
        scale, unit = (_MIB, "MiB") if name.endswith("_bytes") else (1, "   ")
        row = "".join(f"{value / scale:>12.1f}" for value in (first, middle, last))
        print(f"{name:24}{unit:4}{row}  {(last - middle) / middle:+.1%}")
    print(
        f"\nthe trainer, per generation: {growth.memory_bytes / 1024:+.1f} KB (median; mean"
        f" {growth.memory_bytes_mean / 1024:+.1f}), {growth.descriptors:+.2f} descriptors,"
        f" {growth.threads:+.2f} threads (allowed: 32 KB, 1, 1)"
    )
    if not growth.settled:
        print("  its memory is not judged: the first groups cost more, since the C library gives threads memory anew")
    for name in SERVER:
        before, after = done.job_samples[0].parts[name], done.job_samples[-1].parts[name]
        print(
            f"{name:>12}: {before.memory_bytes / _MIB:.1f} -> {after.memory_bytes / _MIB:.1f} MiB, "
            f"{before.descriptors} -> {after.descriptors} descriptors, {before.threads} -> {after.threads} threads"
        )
    postgres = [one.postgres_bytes / _MIB for one in done.job_samples]
    print(f"{'postgres':>12}: {postgres[0]:.1f} -> {postgres[-1]:.1f} MiB (shared pages by share; not in the sum)\n")
    print(f"server, jobs     {chart([one.server.memory_bytes for one in done.job_samples])}")
    print(f"server, resizes  {chart([one.server.memory_bytes for one in done.resize_samples])}")
    print(f"trainer          {chart([one.usage.memory_bytes for one in done.resizes.looks])}")


def to_document(done: Soak, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "results": done.results(),
        "settings": settings,
        "machine": {"cores": os.cpu_count(), "kernel": os.uname().release},
        "seconds": done.seconds,
        "jobs_ended": dict(done.jobs.ended),
        "resizes": done.resizes.done,
        "trainer_per_generation": asdict(done.growth),
        "shims_left": done.shims_left,
        "faults": done.faults(),
        "series": {
            "jobs": [asdict(one) for one in done.job_samples],
            "resizes": [asdict(one) for one in done.resize_samples],
            "trainer": [asdict(one) for one in done.resizes.looks],
        },
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 jobs and 20 resizes")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--resizes", type=int)
    parser.add_argument("--at-once", type=int, default=6, help="jobs in flight (default 6, of which 4 have a slot)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and series there")
    options = parser.parse_args(arguments)
    jobs = options.jobs or (40 if options.quick else 500)
    resizes = options.resizes or (20 if options.quick else 200)
    print(f"{jobs} jobs, {options.at_once} at once, then {resizes} resizes; {os.cpu_count()} cores, {SLOTS} slots")
    done = soak(jobs=jobs, resizes=resizes, at_once=options.at_once)
    show(done)
    if options.json is not None:
        settings = {"jobs": jobs, "resizes": resizes, "at_once": options.at_once, "slots": SLOTS}
        options.json.write_text(json.dumps(to_document(done, settings), indent=1) + "\n")
    for fault in done.faults():
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if done.faults() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
