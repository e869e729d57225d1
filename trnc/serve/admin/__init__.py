"""Health, version and metrics."""
