"""``danube version``."""

from __future__ import annotations

import click

from danube.cli.terminal.output import output_option, show


@click.command(short_help="Print the version.")
@output_option()
def version(output: str) -> None:
    """Print the version of Danube and of the Python that runs it."""
    import platform

    from danube import __version__

    show(
        {
            "danube": __version__,
            "python": platform.python_version(),
            "platform": f"{platform.system().lower()}-{platform.machine()}",
        },
        output,
    )
