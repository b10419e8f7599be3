"""The outside world, one door each: time, files, sockets, memory, diagnostics."""
