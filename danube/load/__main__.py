"""``python -m danube.load``: Locust with our users; ``danube load`` executes it.

The first import patches the process for gevent, before anything that opens a socket is there.
"""

import locust.main  # isort: skip

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv[0] = "danube load"
    sys.argv[1:1] = ["--locustfile", str(Path(__file__).with_name("locustfile.py"))]
    try:
        locust.main.main()
    except KeyboardInterrupt:
        sys.exit(130)
