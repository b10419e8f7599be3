"""Who gets which record: windows, grants, acks, redelivery."""
