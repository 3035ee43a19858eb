"""Shows the story: a live picture on a terminal, plain lines anywhere else."""

import time
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.picture import JobPicture, Picture

_COLOURS: Final = ("cyan", "magenta", "yellow", "green")
_LINES_SHOWN: Final = 14


class Screen(Protocol):
    """Where the story is shown. ``show`` is cheap and may be called at any rate."""

    def show(self, picture: Picture) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None: ...


def make_screen(console: Console, *, began: float) -> Screen:
    """A live picture if the console is a terminal, else lines. ``began``: wall time of the start in seconds."""
    return LiveScreen(console, began=began) if console.is_terminal else PlainScreen(console, began=began)


class PlainScreen:
    """One line per event and per thing the demo does; nothing is ever repainted."""

    def __init__(self, console: Console, *, began: float) -> None:
        self._console, self._began = console, began
        self._shown = 0

    def show(self, picture: Picture) -> None:
        for at, sentence in picture.lines[self._shown :]:
            self._print(at, sentence)
        self._shown = len(picture.lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def _print(self, at: float, sentence: str) -> None:
        self._console.print(f"{at - self._began:6.1f}  {sentence}", highlight=False, markup=False, soft_wrap=True)


class LiveScreen:
    """The whole picture, repainted a few times a second."""

    def __init__(self, console: Console, *, began: float) -> None:
        self._began = began
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def show(self, picture: Picture) -> None:
        self._live.update(paint(picture, began=self._began, now=time.time()))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._live.stop()


def paint(picture: Picture, *, began: float, now: float) -> RenderableType:
    """The picture as one panel; ``began`` and ``now`` are wall times in seconds."""
    colours = {job: _COLOURS[i % len(_COLOURS)] for i, job in enumerate(picture.jobs)}
    jobs = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for heading in ("job", "class", "state", "workers", "step", "loss", "busy"):
        jobs.add_column(heading, no_wrap=True)
    for job_id, job in picture.jobs.items():
        jobs.add_row(*_row(job, colour=colours[job_id]))
    events = Table.grid(padding=(0, 2, 0, 0))
    events.add_column(justify="right", style="dim")
    events.add_column(overflow="fold")
    for at, sentence in picture.lines[-_LINES_SHOWN:]:
        events.add_row(f"{at - began:.1f}", Text(sentence))
    parts: list[RenderableType] = [
        Text.assemble(("now  ", "dim"), (picture.now, "bold")),
        _slots(picture, colours),
        Text(),
        jobs,
        Text(),
        events,
    ]
    return Panel(Group(*parts), title=f"Tidewright · {now - began:.0f} s", title_align="left", border_style="dim")


def _row(job: JobPicture, *, colour: str) -> tuple[RenderableType, ...]:
    workers = f"{job.running}" if job.running == job.granted else f"{job.running} → {job.granted}"
    return (
        Text(job.name, style=colour),
        job.priority,
        job.state,
        workers,
        str(job.step),
        "" if job.loss is None else f"{job.loss:.3f}",
        "" if job.utilisation is None else f"{job.utilisation:.0%}",
    )


def _slots(picture: Picture, colours: dict[str, str]) -> Text:
    text = Text.assemble(("slots ", "dim"))
    free = picture.slots
    for job_id, job in picture.jobs.items():
        text.append("■ " * job.granted, style=colours[job_id])
        free -= job.granted
    return text.append("□ " * max(0, free), style="dim")
