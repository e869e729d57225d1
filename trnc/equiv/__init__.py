"""Comparing graphs: canonical diffs."""
