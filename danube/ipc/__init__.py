"""Shared memory between the workers of one broker: rings, doorbells and counters.

Nothing here survives the broker: the supervisor makes one :class:`~danube.ipc.region.Region` before it
forks, and the kernel frees it with the last process.  ``docs/formats/region.md`` draws the memory.
"""
