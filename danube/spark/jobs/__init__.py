"""What all jobs share: options, running tasks, findings."""
