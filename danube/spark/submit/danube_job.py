"""One of Danube's jobs in the session that spark-submit prepared.

    spark-submit --master spark://host:7077 "$(danube spark file)" validate --storage s3://bucket/prefix

The Python of driver and workers must be one with Danube in it.  This folder holds nothing else that could be
imported by name, because Python looks for modules beside a file that it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from danube.spark.submit import JOBS

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the first word names with the words behind it; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in JOBS:
        sys.stderr.write(f"name one of the jobs {', '.join(JOBS)} and its options\n")
        return EXIT_USAGE
    code: int = import_module(f"danube.spark.jobs.{words[0]}.{words[0]}").main(words[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
