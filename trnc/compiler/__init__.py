"""Variant matrix, programs, canonical graphs, artifacts, the store, the manifest."""
