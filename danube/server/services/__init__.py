"""One plain class for each gRPC service: reads a request, asks the broker, builds the response.

A method is ``async def create_topic(request, call) -> response``.  It raises errors of
:mod:`danube.errors` and nothing else, whatever the request holds; the door turns them into statuses.
"""
