"""The pool that holds the descriptors of the protos in this folder and nothing else.

A pool of its own keeps the process free of clashes: another package may bring ``grpc.health.v1`` or
``danube`` with a file of another name, and the default pool refuses the second one.  It also bounds
what reflection can show.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor_pool import DescriptorPool

POOL: Final = DescriptorPool()
