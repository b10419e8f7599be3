"""Common parts of commands: words in, words out, errors, exit codes."""
