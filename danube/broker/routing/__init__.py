"""Which worker a frame is for, and the way there."""
