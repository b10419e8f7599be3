"""The pure heart of Danube: no socket, file, clock, thread or async.  Events go in, effects come out."""
