"""One module per way to turn a stage graph into something that runs."""
