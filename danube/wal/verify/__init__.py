"""An independent reader of everything that is stored; shares no code with the writers."""
