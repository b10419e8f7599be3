"""Common parts of all jobs: options, running tasks, findings."""
