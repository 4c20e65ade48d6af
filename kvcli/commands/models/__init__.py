"""`kvcli models`."""
