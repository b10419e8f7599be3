"""Load tests: Locust users that publish and consume on a schedule and account for every record.

``danube load`` runs them; ``perf/locustfile.py`` gives them to Locust itself.  The deciding modules (plan,
schedule, stamp, audit) use neither Locust nor a broker; ``locustfile`` and ``conduct`` are the only doors to
Locust.
"""
