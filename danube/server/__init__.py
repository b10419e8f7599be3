"""The doors: they translate between a protocol and :mod:`danube.broker.api`."""
