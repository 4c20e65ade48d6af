"""The draft tree: candidates of all sources, how it grows, and when it stops."""
