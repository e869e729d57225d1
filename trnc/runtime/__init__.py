"""Catalog, executor and device state: what runs compiled programs."""
