"""The client: one protocol machine without a socket, an asyncio shell and a blocking one.

``danube.connect`` and ``danube.sync.connect`` are the ways in.
"""
