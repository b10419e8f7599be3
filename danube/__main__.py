"""``python -m danube`` is the ``danube`` command."""

from danube.cli import main

if __name__ == "__main__":
    main()
