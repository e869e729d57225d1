"""The HTTP server: a composition root, and one package per API."""
