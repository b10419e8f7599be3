"""The load test's users for Locust's own command: ``locust -f perf/locustfile.py --headless -u 8 -t 30s``.

``danube load`` runs the same; docs/load.md says what is measured and checked.  Import this to add users of
your own beside these.
"""

from danube.load.locustfile import *  # noqa: F403
