"""Delivery to the consumers of a subscription: windows, grants, acks, redelivery."""
