"""``python -m danube`` is the ``danube`` command."""

from danube.cli.main import main

if __name__ == "__main__":
    main()
