"""``python -m danube`` is the ``danube`` command."""

import os
import sys

# `python -m` puts the current folder first on the path; a `uuid.py` lying there must not be executed.
# A checkout that is not installed still works: the package is imported already and knows its folder.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from danube.cli.main import main

if __name__ == "__main__":
    main()
