"""The ``danube`` command; each command is a module that is imported when it is called."""
