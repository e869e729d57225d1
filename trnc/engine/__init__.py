"""The host side of serving: requests, scheduler, KV pages, prefix tree, loops, messages."""
