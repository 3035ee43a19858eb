"""Stops running jobs for ``tide down`` and lets them go on at the next ``tide up``, through the public API.

A job is stopped by holding it: it writes a checkpoint, its workers end, it stays in the queue. Which jobs were held
and at which version of their request stands in ``held.json`` **before** they are held, so that neither a crash nor a
second ``down`` loses one; a job that somebody has changed since is left alone.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from services.launch.record import write_json

_LIVING: Final = ("Starting", "Running", "Draining")
_WAITING: Final = ("Queued",)
_TRIES: Final = 3
REASON_DOWN: Final = "tide down"
REASON_UP: Final = "tide up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """``held``: jobs that stand still now and go on at the next start; ``running``: that did not stop in time."""

    held: int
    running: int


def stop_jobs(url: str, state: Path, *, seconds: float, impatient: Callable[[], bool]) -> Stopped:
    """Hold whatever runs or waits, and wait until nothing runs. Raises httpx.HTTPError if intake is away.

    Waiting jobs first: otherwise each would start in the room that a stopped one leaves. ``impatient`` ends the
    waiting early. Cost: one request a job.
    """
    deadline = time.monotonic() + seconds
    held: set[str] = set()
    with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
        while living := list(_jobs(client, _LIVING)):
            fresh = [job for job in living if job["phase"] != "Draining" and job["id"] not in held]
            for job in [*(_jobs(client, _WAITING) if fresh else ()), *fresh]:
                if _hold(client, state, job):
                    held.add(str(job["id"]))
            if time.monotonic() > deadline or impatient():
                break
            time.sleep(0.2)
    return Stopped(held=len(held), running=len(living))


def release_jobs(url: str, state: Path) -> int:
    """Let go what ``stop_jobs`` held and nobody has touched since; gives how many. Raises httpx.HTTPError."""
    wanted = _read(state)
    released = 0
    with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
        # Those that ran were held last: they get their room back before those that waited may take it.
        for job_id, version in reversed(wanted.items()):
            change = {"held": False, "reason": REASON_UP}
            response = client.patch(f"/v1/jobs/{job_id}", json=change, headers={"If-Match": f'"{version}"'})
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                response.raise_for_status()
            released += response.is_success
    (state / "held.json").unlink(missing_ok=True)
    return released


def _hold(client: httpx.Client, state: Path, job: dict[str, Any]) -> bool:
    """Hold one job at the version that was seen; repeats a lost race."""
    job_id, version = str(job["id"]), int(job["version"])
    for _ in range(_TRIES):
        write_json(state / "held.json", {**_read(state), job_id: version + 1})
        response = client.patch(
            f"/v1/jobs/{job_id}",
            json={"held": True, "reason": REASON_DOWN},
            headers={"If-Match": f'"{version}"'},
        )
        if response.is_success:
            return True
        if response.status_code != httpx.codes.PRECONDITION_FAILED:
            return False  # it has ended meanwhile
        version = int(client.get(f"/v1/jobs/{job_id}").raise_for_status().json()["version"])
    return False


def _jobs(client: httpx.Client, phases: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    cursor: str | None = None
    while True:
        parameters = [("phase", phase) for phase in phases] + [("limit", "200")]
        parameters += [("cursor", cursor)] if cursor else []
        page = client.get("/v1/jobs", params=tuple(parameters)).raise_for_status().json()
        yield from page["items"]
        cursor = page.get("next_cursor")
        if cursor is None:
            return


def _read(state: Path) -> dict[str, int]:
    try:
        value: Any = json.loads((state / "held.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {str(job): version for job, version in value.items() if isinstance(version, int)}
