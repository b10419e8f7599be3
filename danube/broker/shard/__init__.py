"""All partitions of one worker, driven by frames and turns."""
