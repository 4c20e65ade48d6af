"""`kvcli chat`."""
