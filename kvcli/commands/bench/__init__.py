"""`kvcli bench`."""
