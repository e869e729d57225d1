"""The API process: HTTP in, tokens out. It never imports torch."""
