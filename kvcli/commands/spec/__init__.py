"""`kvcli spec`."""
