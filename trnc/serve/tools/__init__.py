"""Tool calls: how models write them, how they are read, and how they are made certain."""
