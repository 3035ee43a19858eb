"""The ``tide`` command line: its group, its errors, and the commands that the server distribution adds."""

import os
from importlib.metadata import entry_points, version
from typing import Any, Final

import click

from tidewright.cli import exits
from tidewright.cli.changes import cancel, hold, priority, release, scale
from tidewright.cli.doctor import doctor
from tidewright.cli.session import Session, told_errors
from tidewright.cli.submit import submit, wait_for
from tidewright.cli.top import top
from tidewright.cli.views import events, get, history, logs, members, ps, why
from tidewright.client import DEFAULT_SERVER

_PLUGINS: Final = "tidewright.commands"
_OF_THE_SERVER: Final = {
    "up": "Start the whole control plane on this machine.",
    "down": "Stop what `tide up` started.",
    "service": "Run one service as a process of its own.",
}
_EPILOG: Final = (
    """\
\b
First steps:
  tide up                          start everything here (in another terminal, or --detach)
  tide submit train.py --max 4     JOB is from now on: its id, the beginning of one, or its name
  tide top                         who holds which slots
  tide logs -f train
  tide why train                   why it waits, grew, shrank or ended
  tide scale train 4


"""
    + exits.TEXT
)


class _Tide(click.Group):
    """Adds the server's commands by entry point, and turns errors into a line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_OF_THE_SERVER, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OF_THE_SERVER:
            return _server_command(cmd_name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        with told_errors():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo("\nInterrupted.", err=True)
                ctx.exit(exits.INTERRUPTED)


@click.group(cls=_Tide, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--server", metavar="URL", envvar="TIDE_SERVER", help=f"Where intake answers. Default: {DEFAULT_SERVER}"
)
@click.option(
    "--retry-seconds",
    type=click.FloatRange(0),
    envvar="TIDE_RETRY_SECONDS",
    help="How long to go on trying when nobody answers. Default: 5, and 60 while watching.",
)
@click.version_option(version("tidewright"), prog_name="tide")
@click.pass_context
def main(ctx: click.Context, server: str | None, retry_seconds: float | None) -> None:
    """Tidewright: elastic PaddlePaddle training on a shared cluster."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    session = Session(server=server, retry_seconds=retry_seconds)
    ctx.obj = session
    ctx.call_on_close(session.close)


def _server_command(name: str) -> click.Command:
    for found in entry_points(group=_PLUGINS, name=name):
        try:
            command: click.Command = found.load()
        except ImportError as exc:
            return _missing(name, f"the server that is installed here cannot be loaded ({exc}): install it anew")
        return command
    return _missing(
        name, f"`tide {name}` is part of the server, which is not installed here: pip install tidewright-server"
    )


def _missing(name: str, reason: str) -> click.Command:
    @click.command(
        name=name,
        help=_OF_THE_SERVER[name],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
    def missing(rest: tuple[str, ...]) -> None:
        raise click.UsageError(reason)

    return missing


for _command in (
    *(submit, ps, get, members, logs, why, history, events, top, wait_for),
    *(scale, hold, release, cancel, priority),
    doctor,
):
    main.add_command(_command)

if __name__ == "__main__":
    main()
