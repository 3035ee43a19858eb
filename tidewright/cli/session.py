"""What every command shares: the server, how to print, and which job is meant."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

import click

from tidewright.cli import exits
from tidewright.client import TERMINAL_PHASES, Client, LostContact, RequestRefused

RETRY_SECONDS: Final = 5.0
WATCH_RETRY_SECONDS: Final = 60.0
_JOB_ID: Final = re.compile(r"j[0-9a-hjkmnp-tv-z]{26}")
_LOOKED_AT_MAX: Final = 10_000

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Session:
    """Made once for an invocation. ``retry_seconds`` None: short for questions, long while watching."""

    server: str | None
    retry_seconds: float | None
    _clients: list[Client] = field(default_factory=list)

    def client(self, *, watching: bool = False) -> Client:
        """A client that lives until the command ends."""
        default = WATCH_RETRY_SECONDS if watching else RETRY_SECONDS
        seconds = default if self.retry_seconds is None else self.retry_seconds
        try:
            client = Client(self.server, retry_seconds=seconds)
        except ValueError as exc:
            raise click.UsageError(f"--server (or TIDE_SERVER): {exc}") from exc
        self._clients.append(client)
        return client

    def close(self) -> None:
        while self._clients:
            self._clients.pop().close()


pass_session = click.make_pass_decorator(Session)
job_argument = click.argument("job", metavar="JOB")


def fail(message: str, *, code: int, way_out: str = "") -> NoReturn:
    """One or two lines on stderr, then the end of the process."""
    click.echo(f"{click.style('error', fg='red')}: {message}", err=True)
    if way_out:
        click.echo(f"  {way_out}", err=True)
    click.get_current_context().exit(code)
    raise AssertionError


@contextmanager
def told_errors() -> Iterator[None]:
    """Errors of the client become a line or two and an exit code."""
    try:
        yield
    except RequestRefused as exc:
        fail(refusal(exc), code=exits.REFUSED)
    except LostContact as exc:
        fail(
            str(exc),
            code=exits.LOST_CONTACT,
            way_out="Is it running? `tide up` starts it here; --server or TIDE_SERVER names another. Jobs go on.",
        )


def refusal(exc: RequestRefused) -> str:
    """What the server said: the field and the way out of each fault, at most five."""
    if not exc.errors:
        return exc.detail or exc.title
    told = []
    for item in exc.errors[:5]:
        name = item.field.lstrip("/").replace("/", ".")
        text = f"{name}: {item.detail}" if name else item.detail
        told.append(f"{text}. {item.way_out}" if item.way_out else text)
    more = len(exc.errors) - len(told)
    return "\n  ".join(told + ([f"... and {more} more"] if more > 0 else []))


@contextmanager
def watched(goes_on: str) -> Iterator[None]:
    """Ctrl-C ends the watching only, and says so."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\nStopped watching; nothing was cancelled. {goes_on}", err=True)
        click.get_current_context().exit(exits.INTERRUPTED)


def resolve(client: Client, given: str) -> str:
    """The id of the job that is meant by an id, the beginning of one, or a name.

    Of several jobs with one name the only unfinished one is meant. Looks at the newest 10,000 jobs at most.
    """
    if _JOB_ID.fullmatch(given):
        return given
    found: list[dict[str, Any]] = []
    for job in client.jobs(limit=_LOOKED_AT_MAX):
        if job["name"] == given or (given.startswith("j") and job["id"].startswith(given)):
            found.append(job)
    named = [job for job in found if job["name"] == given]
    found = named or found
    unfinished = [job for job in found if job["phase"] not in TERMINAL_PHASES]
    for choice in (found, unfinished):
        if len(choice) == 1:
            return str(choice[0]["id"])
    if not found:
        fail(f"no job is named {given!r}, and no id begins so", code=exits.REFUSED, way_out="`tide ps` lists them.")
    listed = "\n  ".join(f"{job['id']}  {job['name']}  {job['phase']}" for job in found[:5])
    more = f"\n  ... and {len(found) - 5} more" if len(found) > 5 else ""
    fail(f"{given!r} may mean {len(found)} jobs; give an id:\n  {listed}{more}", code=exits.REFUSED)
