"""Metadata that survives and is agreed on: the engines behind danube.core.metadata.ports.Consensus."""
