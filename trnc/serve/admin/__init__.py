"""What changes a running server: aborting requests, flushing the prefix cache."""
