"""`kvcli summarize`."""
