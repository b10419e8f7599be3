"""Format("danube") for reading: batches, streams, frames, typed columns."""
