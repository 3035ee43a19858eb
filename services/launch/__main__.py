"""``python -m services.launch up|down|service``: the server's commands without the rest of ``tide``."""

import click

from services.launch.commands import down, service, up

main = click.Group(commands={"up": up, "down": down, "service": service})

if __name__ == "__main__":
    main()
