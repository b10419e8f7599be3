"""``danube spark``: jobs over stored history.  Each reads its own options, as under ``spark-submit``."""

from __future__ import annotations

from importlib import import_module

import click

from danube.errors import ConfigInvalid

_AS_THEY_ARE = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_JOBS = {
    "validate": "Check every byte of stored history.",
    "replay": "Store a topic's records again: in another topic, another cluster or files.",
    "compact": "Merge small segments; keep the latest record of each key.",
    "export": "Write topics as Parquet, Delta or Iceberg tables.",
}


@click.group()
def spark() -> None:
    """Jobs over stored history, in Spark or in processes of this machine.

    \b
    danube spark validate --local --storage /var/lib/danube
    danube spark replay --storage s3://bucket/prefix --topic /default/orders \\
        --to danube://other:6660 --to-topic /default/orders
    danube spark JOB --help

    \b
    spark-submit --master spark://host:7077 "$(danube spark file)" validate --storage s3://bucket/prefix

    Spark and a Java runtime come with `pip install 'danube-broker[spark]'`; --local needs no Java.
    """


def _add(job: str, line: str) -> None:
    @spark.command(job, context_settings=_AS_THEY_ARE, add_help_option=False, help=line, short_help=line)
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def command(words: tuple[str, ...]) -> int:
        try:
            module = import_module(f"danube.spark.jobs.{job}.{job}")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "danube":
                raise
            raise ConfigInvalid(
                f"danube spark {job} needs {error.name}",
                why="it is not installed",
                hint="pip install 'danube-broker[spark]'",
            ) from None
        code: int = module.main(list(words))
        return code


for _name, _line in _JOBS.items():
    _add(_name, _line)


@spark.command("file", short_help="The file for spark-submit.")
def submitted_file() -> None:
    """Print the path of the file for spark-submit; the name and options of a job follow it."""
    from danube.spark.submit import submitted_file

    click.echo(submitted_file())


@spark.command("java-home", short_help="The Java runtime for Spark.")
def java_home() -> None:
    """Print the JAVA_HOME that the jobs use: this machine's own, else the one that pip installed."""
    from danube.spark.java import find_java

    click.echo(find_java())
